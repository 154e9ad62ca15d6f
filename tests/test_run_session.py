"""Twenty `headgate run` processes at once in one session of a dollar, on a real server."""

from __future__ import annotations

from pathlib import Path

from run_commands import Commands
from run_sessions import COST_MICRO_USD, Session, micro

PROCESSES = 20


def test_twenty_processes_at_once_spend_what_fits_their_session_and_no_more(
    tmp_path: Path, valkey_url: str
) -> None:
    session = Session(
        Commands(tmp_path), valkey_url, limit_usd="1.00", processes=PROCESSES, steps_each=2
    )
    session.run_all()
    assert session.faults() == []
    # Fourteen steps of seven cents go into a dollar, and a fifteenth does not.
    assert micro(session.status()["spentUsd"]) == 14 * COST_MICRO_USD == 980_000
    shown = session.budget("status").stdout
    assert shown.startswith("Spent: $0.98 / $1.00")
    for name, count in session.done().items():
        if count:
            assert f"{name}: $0.{7 * count:02}" in shown
