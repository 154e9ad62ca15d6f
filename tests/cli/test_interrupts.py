"""Ctrl-C ends a command with 130 and at most one line, whatever the command is doing."""

from __future__ import annotations

import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SECONDS = 60.0
MOMENTS = 20
# Says when the command begins; what the interpreter does before is not the command's.
BEGIN = "from headgate.__main__ import main; print(flush=True); main()"
# Interrupts itself where a function of Python's own is called.
INTERRUPTED_IN = """
import signal, sys
from headgate.__main__ import main

folder, function = sys.argv.pop(1), sys.argv.pop(1)

def interrupt(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_name == function and folder in code.co_filename:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)

sys.setprofile(interrupt)
main()
"""
# Interrupts itself while the loop waits for its last thread, which then finds the loop closed.
INTERRUPTED_AT_THE_END = """
import asyncio, signal, threading, time
import headgate.cli.main
from headgate.__main__ import main
from headgate.cli.main import loop_factory

async def leave_a_thread():
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.6)
    threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,)).start()

def command():
    with asyncio.Runner(loop_factory=loop_factory() if {is_fast} else None) as runner:
        runner.run(leave_a_thread())

headgate.cli.main.main = command
main()
"""
MOMENTS_OF_PYTHON = {
    "where no code can catch it, as a lock of an import is let go": ("importlib", "cb"),
    "while an event loop is made": ("asyncio", "_make_self_pipe"),
    "as a field learns its name, which Python 3.11 tells as another error": (
        "dataclasses",
        "__set_name__",
    ),
}


@pytest.mark.parametrize(
    "moment", MOMENTS_OF_PYTHON.values(), ids=[name.split(",")[0] for name in MOMENTS_OF_PYTHON]
)
def test_an_interrupt_within_python_itself_ends_the_command_as_well(
    moment: tuple[str, str],
) -> None:
    command = ["worker", "--agent", "a", "--command", "true", "--url", "http://127.0.0.1:1"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IN, *moment, *command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


@pytest.mark.parametrize("is_fast", [True, False], ids=["uvloop", "asyncio"])
def test_an_interrupt_as_a_loop_ends_leaves_no_traceback_of_its_threads(*, is_fast: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_THE_END.format(is_fast=is_fast)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


@contextmanager
def command_of(silent: socket.socket) -> Iterator[subprocess.Popen[str]]:
    """Give a command that has begun, and will wait for a server that says nothing."""
    url = f"postgresql://user@127.0.0.1:{silent.getsockname()[1]}/db"
    command = [sys.executable, "-c", BEGIN, "budget", "status", "--ledger", url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "\n"
            yield process
        finally:
            process.kill()


def seconds_until_it_waits() -> float:
    with socket.create_server(("127.0.0.1", 0)) as silent, command_of(silent):
        begun = time.monotonic()
        silent.settimeout(SECONDS)
        with silent.accept()[0]:
            return time.monotonic() - begun


def test_an_interrupt_at_any_moment_is_one_line_at_most_and_exit_code_130() -> None:
    within_seconds = 1.2 * seconds_until_it_waits()
    delays = random.Random(130)
    for _ in range(MOMENTS):
        delay_seconds = delays.uniform(0, within_seconds)
        with socket.create_server(("127.0.0.1", 0)) as silent, command_of(silent) as process:
            select.select([silent], [], [], delay_seconds)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=SECONDS)
        told = (delay_seconds, stdout, stderr)
        assert process.returncode == 130, told
        assert stderr.count("\n") <= 1, told
