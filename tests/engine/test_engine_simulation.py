"""The whole engine under crashes and faults: what was promised holds at every commit.

`SIMULATED_SEEDS=5000 pytest tests/runtime/test_engine_simulation.py -o timeout=0` plays more
seeds than the few of every run.
"""

from __future__ import annotations

import os

import pytest

from engine.simulated_service import plan_of, run_service

SEEDS = int(os.environ.get("SIMULATED_SEEDS", "24"))
SEEDS_A_TEST = 4


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_A_TEST))
def test_whatever_crashes_nothing_acknowledged_is_lost_and_no_limit_is_passed(first: int) -> None:
    for seed in range(first, min(first + SEEDS_A_TEST, SEEDS)):
        report = run_service(plan_of(seed))
        assert report.problems == (), f"seed {seed}"
        assert report.tasks >= report.acknowledged


def test_the_same_seed_gives_the_same_run() -> None:
    plan = plan_of(9)
    assert run_service(plan) == run_service(plan)
