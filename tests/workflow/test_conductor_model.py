"""Random workflows against the plain model: interrupted, killed and resumed at random moments."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate.testing import SimulatedLoop, simulate
from headgate.workflow.backend import StepOrder, TaskState
from headgate.workflow.conductor import SMALLEST_WINDOW, Conductor
from headgate.workflow.report import RunReport, RunState, StepRow
from workflow.fake_backend import FakeBackend, Fate, Fates, KeptTasks, a_run
from workflow.plain_model import Plan, Word, expected, plans

PATIENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

ends = st.lists(
    st.tuples(st.sampled_from(["kill", "interrupt", "stop"]), st.floats(0.0, 6.0)), max_size=4
)


def fates_of(plan: Plan) -> Fates:
    def fate(order: StepOrder) -> Fate:
        fails = (order.step.id, order.index) in plan.failing
        state = TaskState.FAILED if fails else TaskState.DONE
        return Fate(state=state, seconds=0.3 + order.number % 3, result=order.index)

    return fate


class Process:
    """One life of a run: what it reported, and of which ends it told."""

    def __init__(self, plan: Plan, kept: KeptTasks, folder: Path) -> None:
        self._plan = plan
        self._kept = kept
        self._folder = folder
        self.ended: list[StepRow] = []

    def live(self, end: tuple[str, float] | None, seed: int) -> RunReport | None:
        """Run to the end, or until something happens to the process."""

        async def main(loop: SimulatedLoop) -> RunReport | None:
            backend = FakeBackend(self._kept, fates_of(self._plan), permits=3)
            run = a_run(self._folder, self._plan.workflow)
            conductor = Conductor(run, backend, clock=loop.clock, ended=self.ended.append)
            carrying = asyncio.create_task(conductor.run())
            if end is not None:
                kind, seconds = end
                await asyncio.wait([carrying], timeout=seconds)
                if kind == "kill" and not carrying.done():
                    backend.crash()
                    carrying.cancel()
                    with suppress(asyncio.CancelledError):
                        await carrying
                    return None
                for _ in range(2 if kind == "stop" else 1):
                    conductor.interrupt()
            return await carrying

        return simulate(main, seed=seed).result


def words_of(report: RunReport) -> dict[str, Counter[str]]:
    return {step.step: Counter(step.counts) for step in report.steps}


def counted(words: dict[str, list[Word]]) -> dict[str, Counter[str]]:
    return {step: Counter(found) for step, found in words.items()}


@PATIENT
@given(plans(), ends, st.integers(0, 100))
def test_a_run_ends_as_the_rules_say_however_often_it_is_resumed(
    plan: Plan, troubles: list[tuple[str, float]], seed: int
) -> None:
    kept = KeptTasks()
    with tempfile.TemporaryDirectory() as folder:
        for trouble in troubles:
            Process(plan, kept, Path(folder)).live(trouble, seed)
        last = Process(plan, kept, Path(folder))
        report = last.live(None, seed)
    assert report is not None
    assert words_of(report) == counted(expected(plan))
    assert report.ended == report.total
    failed = any("failed" in found for found in expected(plan).values())
    assert report.state is (RunState.FAILED if failed else RunState.DONE)
    _check_submissions(kept)
    _check_rows(last)


def _check_submissions(kept: KeptTasks) -> None:
    """No run was submitted after it was done for good, and generations follow each other."""
    assert len(set(kept.submitted)) == len(kept.submitted)
    latest: dict[int, int] = {}
    for number, generation in kept.submitted:
        assert generation == latest.get(number, -1) + 1
        latest[number] = generation
    for (number, generation), task in kept.tasks.items():
        if task.state is TaskState.DONE and not task.is_provisional:
            assert generation == latest[number]
            assert kept.executed[number] <= 1 + sum(
                1
                for other in kept.tasks.values()
                if other.number == number
                and (other.state is TaskState.FAILED or other.is_provisional)
            )
    assert kept.most_unfinished <= SMALLEST_WINDOW


def _check_rows(process: Process) -> None:
    """Every run has one end, and it is told once."""
    names = [row.name for row in process.ended]
    assert len(set(names)) == len(names)


@PATIENT
@given(plans(), st.integers(0, 400), st.integers(0, 100))
def test_a_budget_is_never_passed_and_every_run_has_one_end(
    plan: Plan, limit: int, seed: int
) -> None:
    kept = KeptTasks()
    kept.limit = limit
    with tempfile.TemporaryDirectory() as folder:
        process = Process(plan, kept, Path(folder))
        report = process.live(None, seed)
        assert report is not None
        assert kept.spent <= limit
        assert report.ended == report.total == len(process.ended)
        rejected = [one for one in kept.tasks.values() if one.state is TaskState.REJECTED]
        assert (report.state is RunState.EXHAUSTED) == bool(rejected)
        kept.limit = None
        again = Process(plan, kept, Path(folder)).live(None, seed)
    assert again is not None
    if not any("failed" in found for found in expected(plan).values()):
        assert again.state is RunState.DONE
    _check_submissions(kept)
