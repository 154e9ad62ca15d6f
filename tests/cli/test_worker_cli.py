"""`headgate worker`: whatever is wrong with a call is one line that says what to do."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from headgate.cli.main import EXIT_BAD_INPUT, run


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "--agent is missing"),
        (["--agent", "a"], "give --run or --command, one of the two"),
        (["--agent", "a", "--run", "m:f", "--command", "cat"], "give --run or --command"),
        (
            ["--agent", "a", "--run", "no function"],
            "headgate: --run: must be written as",
        ),
        (
            ["--agent", "a", "--run", "no_such_module:f"],
            ": --run: no_such_module cannot be imported",
        ),
        (
            ["--agent", "a", "--run", "headgate:nothing"],
            ": --run: headgate has no function nothing",
        ),
        (["--agent", "a", "--command", "cat {slot.key}"], "headgate: --command: "),
        (["--agent", "a", "--command", ""], "must begin with the name of a program"),
        (["--agent", "a", "--command", "echo 'open"], "cannot be read: No closing quotation"),
        (["--agent", "a", "--command", "cat", "--capacity", "0"], "0 is not in the range"),
        (["--agent", "a", "--command", "cat", "--url", "nowhere"], "url"),
    ],
)
def test_a_call_that_cannot_work_is_refused(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["worker", *arguments]) == EXIT_BAD_INPUT
    said = capsys.readouterr().err
    assert line in said
    assert "Traceback" not in said


def test_a_service_that_is_not_there_is_asked_again_until_the_worker_is_stopped() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "headgate", "worker", "--agent", "a", "--command", "cat"]
    with subprocess.Popen(
        [*command, "--url", f"http://127.0.0.1:{port}"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(20.0) == 0
    assert "the service does not answer, and is asked again" in lines[1]
