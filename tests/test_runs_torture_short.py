"""A short form of `make torture`: runs are killed and resumed, and nothing runs or costs twice."""

from __future__ import annotations

import pytest

from torture_runs import assert_no_broken_promise

KILLS = 20
"""A quarter of these is done here."""
BACKENDS = ("local", "redis", "local-unknown")


@pytest.mark.timeout(200)
def test_runs_that_are_killed_go_on_where_they_were() -> None:
    assert_no_broken_promise(
        [("runs", "--kills", str(KILLS), "--backend", backend) for backend in BACKENDS],
        seconds=150,
    )
