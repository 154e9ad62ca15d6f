"""A screen of `headgate top` without a terminal, over a real service: its text, and its keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from textual import events
from textual._context import visible_screen_stack
from textual.pilot import Pilot

from headgate import Client
from headgate.api.app import App
from headgate.api.http.server import serve
from headgate.cli import slot as slots_view
from headgate.cli import task_view, why
from headgate.cli.top.app import Texts, Top

TEXTS = Texts(task=task_view.lines_of, why=why.lines_of, slot=slots_view.lines_of)
PAUSE_SECONDS = 0.01
PATIENCE_SECONDS = 15.0
KEY_NAMES = {"/": "slash", "\n": "enter"}


class Terminal:
    """What a person does at a screen: look at it, and press keys."""

    def __init__(self, app: Top, pilot: Pilot[None]) -> None:
        self.app = app
        self._pilot = pilot

    def text(self) -> str:
        """Return what is on the screen, a line for each of its lines."""
        # The one place that has the lines of all widgets and dialogs as they are sent, with what
        # is seen behind a dialog.
        visible_screen_stack.set(self.app._background_screens)
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips)

    async def press(self, *keys: str) -> None:
        """Press keys, and wait until they were taken."""
        await self._pilot.press(*keys)

    async def paste(self, text: str) -> None:
        """Send keys all at once, as a terminal does with what is pasted or typed fast."""
        for character in text:
            self.app.post_message(events.Key(KEY_NAMES.get(character, character), character))
        await self._pilot.pause()

    async def resize(self, width: int, height: int) -> None:
        """Make the terminal larger or smaller."""
        await self._pilot.resize_terminal(width, height)
        await self._pilot.pause()

    async def sees(self, *wanted: str, without: str = "\0") -> str:
        """Wait until all of these are on the screen, and return it."""
        return await self.until(
            lambda text: all(one in text for one in wanted) and without not in text
        )

    async def until(self, is_so: Callable[[str], object]) -> str:
        """Wait until something is so of the screen, and return it."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not is_so(text := self.text()):
                    await self._pilot.pause(0.02)
        except TimeoutError:
            raise AssertionError(self.text()) from None
        return text


@asynccontextmanager
async def screen(
    url: str,
    *,
    token: str | None = None,
    size: tuple[int, int] = (80, 24),
) -> AsyncIterator[Terminal]:
    """Open a screen over the service at an address."""
    async with Client(url, token=token, retries=0, timeout_seconds=5.0) as client:
        app = Top(client, TEXTS, pause_seconds=PAUSE_SECONDS)
        async with app.run_test(size=size) as pilot:
            yield Terminal(app, pilot)


@asynccontextmanager
async def serving(app: App, port: int = 0) -> AsyncIterator[int]:
    """Serve an application on this machine, and give the port; at the end all connections close."""
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(app, host="127.0.0.1", port=port, on_ready=lambda _, taken: ready.set_result(taken))
    )
    try:
        yield await ready
    finally:
        task.cancel()
        await asyncio.wait((task,))
