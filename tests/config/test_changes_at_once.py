"""Changes that meet: what was answered is not undone by what was read before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from config.running import FAST, WORK, Running, running
from headgate.config import overrides
from headgate.storage.transaction import Access, Transaction

Result = TypeVar("Result")

FILE = FAST + WORK + "[projects.a]\ncredit_weight = 2.0\n"


class LateAnswers:
    """A way into the store whose answers about overrides come when they are let through."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.has_read = asyncio.Event()
        self.let_through = asyncio.Event()

    def now(self) -> float:
        return self._access.now()

    async def run(self, operation: Callable[[Transaction, float], Result]) -> Result:
        return await self._access.run(operation)

    async def ask(
        self, question: Callable[[Transaction], Result], *, is_long: bool = False
    ) -> Result:
        answer = await self._access.ask(question, is_long=is_long)
        if question is overrides.read_overrides:
            self.has_read.set()
            await self.let_through.wait()
        return answer


async def change_during(service: Running, looking: Callable[[], asyncio.Future[None]]) -> None:
    """Change a project while somebody is looking for overrides."""
    config = service.service.config
    late = LateAnswers(config._access)
    config._access = late
    look = looking()
    await late.has_read.wait()
    changing = asyncio.ensure_future(
        service.ask("PATCH", "/projects/a", {"status": "paused", "creditWeight": 7})
    )
    await asyncio.wait({changing}, timeout=0.2)
    late.let_through.set()
    await look
    assert (await changing).status == 200


@pytest.mark.parametrize("name", ["refresh", "prepare"])
async def test_a_change_is_not_undone_by_a_look_that_began_before_it(
    tmp_path: Path, name: str
) -> None:
    async with running(tmp_path, FILE) as service:
        looks = getattr(service.service.config, name)
        await change_during(service, lambda: asyncio.ensure_future(looks()))
        shown = await service.get("/projects/a")
        assert (shown["status"], shown["creditWeight"]) == ("paused", 7.0)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_a_node_does_not_adopt_its_own_change_a_second_time(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    urls = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path}/headgate.db"}
    store = urls.get(kind) or request.getfixturevalue("postgres_url")
    async with running(tmp_path, FILE, store=store) as service:
        config = service.service.config
        await service.ask("PATCH", "/projects/a", {"status": "paused", "creditWeight": 7})
        await service.ask("POST", "/scheduler/pause")
        before = config.state
        assert await config._access.ask(overrides.read_overrides) == before.overrides
        await config.refresh()
        assert config.state is before
