"""Functions of a Ray program that hold money and a permit: one governor for the whole cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headgate
from doc_pages import ROOT, run_page
from headgate.budgets.connect import connect_budget
from headgate.errors import BudgetExceededError, InvalidSettingError
from on_ray.conftest import connected

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


def test_what_cannot_be_governed_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="at least 1"):
        headgate.ray.governed(budget="memory:", concurrency=0)
    with pytest.raises(InvalidSettingError, match="a generator cannot be governed"):

        @headgate.ray.governed(budget="memory:")
        def numbers() -> Iterator[int]:
            yield 1

    with pytest.raises(InvalidSettingError, match="inside a governed function"):
        headgate.ray.charge("1.00")
