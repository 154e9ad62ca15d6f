"""Work of a request in slices: between them the loop belongs to others.

Rule: nothing that a client may ask for holds the loop for more than a few milliseconds. What may
take longer, as a body of a megabyte or an answer of thousands of rows, is a generator that yields
within `SLICE_SECONDS` of work. Signs of life, answers to others and the dispatcher go on meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from headgate.core.text import SLICE_SECONDS, Result, Steps, in_turns
from headgate.storage.writer import asker

Row = TypeVar("Row")


class _SliceTurns:
    """Who may work for the next slice: one in a round of the loop, of each caller in turn."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_dealing = False

    def next(self) -> asyncio.Future[None]:
        """Return the next turn of whoever asks."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(asker.get(), deque()).append(turn)
        if not self._is_dealing:
            self._is_dealing = True
            loop.call_soon(self._deal)
        return turn

    def _deal(self) -> None:
        while self._waiting:
            who = next(iter(self._waiting))
            turns = self._waiting.pop(who)
            turn = turns.popleft()
            if turns:
                # It is the last in turn now.
                self._waiting[who] = turns
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._deal)
                return
        self._is_dealing = False


_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, _SliceTurns] = WeakKeyDictionary()


async def in_slices(steps: Steps[Result]) -> Result:
    """Do work to its end, and give others their turn whenever it has taken a slice of time.

    Of all work that takes longer than a slice one has a turn in a round of the loop, so that sixty
    large bodies hold the loop no longer than one does; and those of one caller keep another's
    waiting for one slice each time.
    """
    return await in_turns(steps, _next_turn, time.perf_counter, SLICE_SECONDS)


def _next_turn() -> asyncio.Future[None]:
    return _TURNS.setdefault(asyncio.get_running_loop(), _SliceTurns()).next()


async def mapped(rows: Iterable[Row], make: Callable[[Row], Result]) -> list[Result]:
    """Make something of each row, in slices."""

    def steps() -> Steps[list[Result]]:
        made: list[Result] = []
        for row in rows:
            made.append(make(row))
            yield
        return made

    return await in_slices(steps())


class SharedAnswers(Generic[Result]):
    """Answers that are made once for all who ask for the same at a time.

    Whoever asks while one is made waits for the next, which begins after that: so no answer is
    older than its question, and hundreds that ask at once cost as much as two. One of them makes
    it, in its own time.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, asyncio.Future[Result]] = {}
        self._next: dict[Hashable, _Next[Result]] = {}

    async def get(self, key: Hashable, make: Callable[[], Awaitable[Result]]) -> Result:
        """Return an answer that was begun after this was called."""
        while (under_way := self._made.get(key)) is not None:
            shared = self._next.setdefault(key, _Next())
            shared.waiting += 1
            try:
                await asyncio.wait((under_way,))
                if self._next.get(key) is shared:
                    del self._next[key]
                    return await self._make(key, make, shared.answer)
                await asyncio.wait((shared.answer,))
            finally:
                shared.waiting -= 1
                if not shared.waiting and self._next.get(key) is shared:
                    del self._next[key]
            # Whoever went away while it made an answer leaves that to the next.
            if not shared.answer.cancelled():
                return shared.answer.result()
        return await self._make(key, make, _Next[Result]().answer)

    async def _make(
        self,
        key: Hashable,
        make: Callable[[], Awaitable[Result]],
        answer: asyncio.Future[Result],
    ) -> Result:
        self._made[key] = answer
        try:
            answer.set_result(await make())
        except Exception as error:
            answer.set_exception(error)
            answer.exception()  # Whether or not somebody else waits for it.
            raise
        finally:
            answer.cancel()
            if self._made.get(key) is answer:
                del self._made[key]
        return answer.result()


class _Next(Generic[Result]):
    """The answer after the one that is made, and how many wait for it."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.waiting = 0
