"""A short form of `make torture`: processes are killed, and the ledger stays right."""

from __future__ import annotations

from budgets.support import SHARED_BACKENDS
from torture_runs import assert_no_broken_promise

KILLS = 8


def test_processes_that_are_killed_neither_overspend_nor_leak() -> None:
    rest = ("--kills", str(KILLS), "--seconds", "1")
    assert_no_broken_promise(
        [("ledger", "--backend", backend, *rest) for backend in SHARED_BACKENDS], seconds=100
    )
