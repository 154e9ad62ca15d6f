"""Ctrl-C during a run: once, twice, three times."""

from __future__ import annotations

import asyncio
import os
import signal

from headgate.cli.run_session import Interruptions, interruptible


class Scene:
    """What an interrupted run is told, in order."""

    def __init__(self, running: int) -> None:
        self.told: list[str] = []
        self.interruptions = Interruptions(
            interrupt=lambda: self.told.append("interrupt"),
            running=lambda: running,
            note=self.told.append,
            leave=lambda code: self.told.append(f"exit {code}"),
        )


def test_the_first_lets_finish_the_second_stops_the_third_ends_the_process() -> None:
    scene = Scene(running=3)
    for _ in range(3):
        scene.interruptions()
    assert scene.told == [
        "interrupt",
        "finishing 3 steps; Ctrl-C again stops them",
        "interrupt",
        "stopping 3 steps; Ctrl-C again ends at once",
        "exit 130",
    ]


def test_one_step_is_one() -> None:
    scene = Scene(running=1)
    scene.interruptions()
    assert scene.told[1] == "finishing 1 step; Ctrl-C again stops it"


async def test_signals_of_both_kinds_interrupt_only_while_the_run_lasts() -> None:
    seen = asyncio.Event()
    told: list[str] = []
    interruptions = Interruptions(
        interrupt=seen.set, running=lambda: 2, note=told.append, leave=lambda _code: None
    )
    with interruptible(interruptions):
        for number in (signal.SIGINT, signal.SIGTERM):
            seen.clear()
            os.kill(os.getpid(), number)
            await seen.wait()
    assert len(told) == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
