"""The supervisor: a loop that fails is started again, and all of them end together."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from headgate.engine.supervisor import HEALTHY_SECONDS, Supervisor
from headgate.testing import SimulatedLoop, simulate


def test_a_loop_that_fails_is_started_again_after_pauses_that_grow() -> None:
    async def main(loop: SimulatedLoop) -> list[float]:
        times: list[float] = []

        async def fails() -> None:
            times.append(loop.time())
            raise LookupError("a fault")

        supervisor = Supervisor()
        supervisor.start("fails", fails)
        await asyncio.sleep(200)
        await supervisor.stop()
        return times

    pauses = [later - earlier for earlier, later in pairwise(simulate(main).result)]
    assert len(pauses) >= 8
    for pause, longest in zip(pauses, (0.5, 1.0, 2.0, 4.0, 8.0), strict=False):
        assert longest / 2 <= pause <= longest
    assert max(pauses) <= 30.0


def test_a_loop_that_ran_well_for_long_starts_again_soon() -> None:
    async def main(loop: SimulatedLoop) -> list[float]:
        pauses: list[float] = []
        failed_at: list[float] = []

        async def fails_seldom() -> None:
            if failed_at:
                pauses.append(loop.time() - failed_at[-1])
            await asyncio.sleep(HEALTHY_SECONDS + 1)
            failed_at.append(loop.time())
            raise LookupError("a fault")

        supervisor = Supervisor()
        supervisor.start("seldom", fails_seldom)
        await asyncio.sleep(1_000)
        await supervisor.stop()
        return pauses

    pauses = simulate(main).result
    assert len(pauses) > 10
    assert max(pauses) <= 0.5


def test_one_loop_that_fails_does_not_disturb_the_others() -> None:
    async def main(loop: SimulatedLoop) -> int:
        rounds = 0

        async def fails() -> None:
            raise LookupError("a fault")

        async def counts() -> None:
            nonlocal rounds
            while True:
                await asyncio.sleep(1)
                rounds += 1

        supervisor = Supervisor()
        supervisor.start("fails", fails)
        supervisor.start("counts", counts)
        await asyncio.sleep(10.5)
        await supervisor.stop()
        assert loop.time() == 10.5
        return rounds

    assert simulate(main).result == 10


def test_a_loop_of_a_name_runs_once_whenever_it_is_started() -> None:
    async def main(_loop: SimulatedLoop) -> tuple[list[int], list[str]]:
        running = 0
        seen: list[int] = []
        begun: list[str] = []

        async def fails() -> None:
            begun.append("fails")
            raise LookupError("a fault")

        async def lasts() -> None:
            nonlocal running
            begun.append("lasts")
            running += 1
            try:
                await asyncio.Event().wait()
            finally:
                running -= 1

        supervisor = Supervisor()
        supervisor.start("one", fails)
        await asyncio.sleep(0.1)
        # Its restart is pending, and takes its place no more.
        supervisor.start("one", lasts)
        await asyncio.sleep(100)
        seen.append(running)
        supervisor.start("one", lasts)
        await asyncio.sleep(100)
        seen.append(running)
        await supervisor.stop()
        return [*seen, running], begun

    assert simulate(main).result == ([1, 1, 0], ["fails", "lasts", "lasts"])


def test_a_loop_that_returns_is_over() -> None:
    async def main(_loop: SimulatedLoop) -> int:
        calls = 0

        async def returns() -> None:
            nonlocal calls
            calls += 1

        supervisor = Supervisor()
        supervisor.start("returns", returns)
        await asyncio.sleep(100)
        await supervisor.stop()
        return calls

    assert simulate(main).result == 1


def test_stopping_waits_until_every_loop_has_cleaned_up() -> None:
    async def main(loop: SimulatedLoop) -> tuple[list[str], float]:
        ended: list[str] = []

        async def slow(name: str) -> None:
            try:
                await asyncio.sleep(1e6)
            finally:
                await asyncio.sleep(2)
                ended.append(name)

        supervisor = Supervisor()
        supervisor.start("one", lambda: slow("one"))
        supervisor.start("two", lambda: slow("two"))
        await asyncio.sleep(1)
        await supervisor.stop()
        await supervisor.stop()
        return sorted(ended), loop.time()

    assert simulate(main).result == (["one", "two"], 3.0)
