"""Functions of a Ray program that hold money and a permit: one governor for the whole cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headgate
from doc_pages import ROOT, run_page
from headgate.budgets.connect import connect_budget
from headgate.errors import BudgetExceededError, BudgetMismatchError, InvalidSettingError
from headgate.inprocess import ray as governing
from on_ray.conftest import connected
from service.support import wait_until

if TYPE_CHECKING:
    from on_ray.conftest import RayCluster


@pytest.fixture(scope="module")
def ray(cluster: RayCluster) -> Iterator[Any]:
    """Stay connected to the cluster for all of these tests."""
    with connected(cluster) as connection:
        yield connection


async def spent(ledger: str, project: str) -> float:
    async with connect_budget(ledger) as tracker:
        return await tracker.get_spent(f"project:{project}")


async def test_a_limit_holds_across_the_workers(ray: Any, tmp_path: Path) -> None:
    ledger = f"sqlite:///{tmp_path}/ledger.db"
    estimate = headgate.Estimate(usd="0.10")

    @ray.remote(num_cpus=0.1)  # type: ignore[untyped-decorator]
    @headgate.ray.governed(
        budget=ledger, project="evals", limit_usd="0.50", concurrency=3, estimate=estimate
    )
    def evaluate(number: int) -> int:
        headgate.ray.charge("0.10", tokens=10)
        return number

    done, refused = 0, 0
    for ref in [evaluate.remote(number) for number in range(12)]:
        try:
            ray.get(ref)
            done += 1
        except BudgetExceededError:
            refused += 1
    assert (done, refused) == (5, 7)
    assert await spent(ledger, "evals") == pytest.approx(0.5)


def test_the_example_of_the_page_can_be_declared() -> None:
    assert all(output.is_right for output in run_page(ROOT / "docs/how-to/run-on-ray.md"))


async def test_no_more_run_at_a_time_than_may(ray: Any, tmp_path: Path) -> None:
    ledger = f"sqlite:///{tmp_path}/ledger.db"
    folder = tmp_path / "running"
    folder.mkdir()

    @ray.remote(num_cpus=0.1)  # type: ignore[untyped-decorator]
    @headgate.ray.governed(budget=ledger, concurrency=2, estimate=headgate.Estimate(usd=0))
    def work(number: int) -> int:
        import time  # noqa: PLC0415

        mine = folder / str(number)
        mine.touch()
        most = 0
        for _ in range(10):
            most = max(most, len(list(folder.iterdir())))
            time.sleep(0.01)
        mine.unlink()
        return most

    most = max(ray.get([work.remote(number) for number in range(8)]))
    assert most <= 2


async def test_methods_of_an_async_actor_are_governed(ray: Any, tmp_path: Path) -> None:
    ledger = f"sqlite:///{tmp_path}/ledger.db"

    class Agent:
        @headgate.ray.governed(
            budget=ledger, project="agents", estimate=headgate.Estimate(usd="0.01")
        )
        async def ask(self, question: str) -> str:
            headgate.ray.charge("0.02")
            return question.upper()

    agent = ray.remote(Agent).options(num_cpus=0).remote()
    assert ray.get([agent.ask.remote("a"), agent.ask.remote("b")]) == ["A", "B"]
    assert await spent(ledger, "agents") == pytest.approx(0.04)


async def test_whoever_dies_with_a_permit_gives_it_back(ray: Any, tmp_path: Path) -> None:
    ledger = f"sqlite:///{tmp_path}/ledger.db"

    @ray.remote(num_cpus=0.1, max_retries=0)  # type: ignore[untyped-decorator]
    @headgate.ray.governed(
        budget=ledger, project="dying", concurrency=1, estimate=headgate.Estimate(usd="0.01")
    )
    def work(dies: bool) -> str:
        if dies:
            os._exit(1)
        headgate.ray.charge("0.01")
        return "done"

    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(work.remote(dies=True))
    assert ray.get(work.remote(dies=False), timeout=90) == "done"
    # Nobody knows what the first one cost, so what was held is booked.
    assert Decimal(str(await spent(ledger, "dying"))) == Decimal("0.02")


def terms_of(ledger: str, *, concurrency: int = 1) -> governing.Terms:
    return governing.Terms(
        budget=ledger,
        project="evals",
        concurrency=concurrency,
        limit_usd=None,
        kind="work",
        estimate=headgate.Estimate(usd="0.10"),
    )


async def test_a_caller_that_died_waiting_gets_no_permit_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(governing, "LEASE_SECONDS", 1.0)
    ledger = f"sqlite:///{tmp_path}/ledger.db"
    governor, terms = governing.Governor(ledger, 1), terms_of(ledger)
    await governor.acquire("first", terms)
    assert await governor.begin("first")

    async def renew() -> None:
        while True:
            for key in ("first", "live"):
                await governor.renew(key, terms, has_begun=False)
            await asyncio.sleep(0.05)

    dead = [asyncio.create_task(governor.acquire(f"dead{n}", terms)) for n in range(5)]
    # They have asked before the one that lives.
    await asyncio.sleep(0)
    live = asyncio.create_task(governor.acquire("live", terms))
    renewing = asyncio.create_task(renew())
    async with asyncio.timeout(10):
        await asyncio.wait(dead[1:])
        await governor.release("first", 0.01, None, has_failed=False)
        await live
        assert await governor.begin("live")
        # Nobody tells the first of the dead that it was its turn.
        assert not await governor.begin("dead0")
        await governor.release("live", 0.01, None, has_failed=False)
    renewing.cancel()
    assert await spent(ledger, "evals") == pytest.approx(0.02)
    assert await governor.in_use() == 0


async def test_a_permit_that_nobody_heard_of_costs_nothing(tmp_path: Path) -> None:
    ledger = f"sqlite:///{tmp_path}/ledger.db"
    governor = governing.Governor(ledger, 1)
    await governor.acquire("one", terms_of(ledger))
    assert await governor.in_use() == 1
    await governor.abandon("one")
    assert await governor.in_use() == 0
    assert await spent(ledger, "evals") == 0


async def test_a_limit_that_is_there_is_never_replaced(ray: Any, tmp_path: Path) -> None:
    ledger = f"sqlite:///{tmp_path}/ledger.db"
    async with connect_budget(ledger) as tracker:
        await tracker.set_budget("project:evals", "5.00")

    @ray.remote(num_cpus=0.1)  # type: ignore[untyped-decorator]
    @headgate.ray.governed(budget=ledger, project="evals", limit_usd="50.00")
    def work() -> None:
        headgate.ray.charge("0.01")

    with pytest.raises(BudgetMismatchError, match=r"\$5.00, and limit_usd says \$50.00"):
        ray.get(work.remote())
    async with connect_budget(ledger) as tracker:
        status = await tracker.status("project:evals")
    assert status.limit_micro_usd == 5_000_000


@pytest.mark.parametrize("restarts", [True, False])
def test_the_end_of_a_governor_costs_no_result_and_lets_no_more_run(
    ray: Any, tmp_path: Path, restarts: bool
) -> None:
    ledger = f"sqlite:///{tmp_path}/ledger.db"
    lines, release = tmp_path / "lines", tmp_path / "release"

    @ray.remote(num_cpus=0.1)  # type: ignore[untyped-decorator]
    @headgate.ray.governed(
        budget=ledger, project="evals", concurrency=1, estimate=headgate.Estimate(usd="0.10")
    )
    def work(number: int) -> int:
        import time  # noqa: PLC0415

        with lines.open("a") as file:
            file.write(f"began {number}\n")
        while not release.exists():
            time.sleep(0.02)
        with lines.open("a") as file:
            file.write(f"ended {number}\n")
        headgate.ray.charge("0.01")
        return number

    def seen() -> list[str]:
        return lines.read_text().splitlines() if lines.exists() else []

    def governor() -> Any:
        try:
            return ray.get_actor(terms_of(ledger).governor, namespace=governing.NAMESPACE)
        except ValueError:
            return None

    first = work.remote(1)
    wait_until(lambda: seen() == ["began 1"], seconds=60, what=lambda: str(seen()))
    ray.kill(governor(), no_restart=not restarts)
    # One that Ray starts again waits for those that run; a new one knows of none before.
    second = work.remote(2) if restarts else None
    wait_until(lambda: permits_of(ray, governor()) == 1, seconds=60)
    second = second or work.remote(2)
    assert seen() == ["began 1"]
    release.touch()
    assert ray.get([first, second], timeout=90) == [1, 2]
    assert seen() == ["began 1", "ended 1", "began 2", "ended 2"]


def permits_of(ray: Any, governor: Any) -> int:
    """Return how many permits a governor has given; none while Ray starts it again."""
    try:
        return 0 if governor is None else int(ray.get(governor.in_use.remote()))
    except ray.exceptions.RayActorError:
        return 0


def test_what_cannot_be_governed_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="at least 1"):
        headgate.ray.governed(budget="memory:", concurrency=0)
    with pytest.raises(InvalidSettingError, match="a generator cannot be governed"):

        @headgate.ray.governed(budget="memory:")
        def numbers() -> Iterator[int]:
            yield 1

    with pytest.raises(InvalidSettingError, match="inside a governed function"):
        headgate.ray.charge("1.00")
