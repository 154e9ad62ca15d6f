"""The Tab key completes commands and names of the running service, and never gets in the way."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import click
import pytest

from headgate import SyncClient
from headgate.cli.completion import ANSWER_SECONDS, NAMED, ServiceName
from headgate.cli.main import COMMANDS, cli
from service.support import ECHO_TARGET, ServiceProcess, running_service

SETTINGS = f"""{ECHO_TARGET}
[projects.search]
[projects.second]
[projects.evals]

[agents.coder-1]

[budgets."session:eval"]
limit_usd = "5.00"
[budgets."session:nightly"]
limit_tokens = 1000
"""


# The command with more time for the service, which a busy machine may need.
PATIENT = """
import sys
import headgate.cli.completion
from headgate.__main__ import main

headgate.cli.completion.ANSWER_SECONDS = float(sys.argv.pop(1))
main()
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("completion")
    (folder / "headgate.toml").write_text(SETTINGS)
    with running_service(folder) as process:
        yield process


def completed(
    address: str, *words: str, shell: str = "bash", answer_seconds: float = 30
) -> list[str]:
    """Ask as the script of a shell does, and return the values that it would offer."""
    typed = ["headgate", *words]
    done = subprocess.run(
        [sys.executable, "-c", PATIENT, str(answer_seconds)],
        env={
            **os.environ,
            "HEADGATE_URL": address,
            "_HEADGATE_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": " ".join(typed),
            "COMP_CWORD": words[-1] if shell == "fish" else str(len(typed) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if line]
    if shell == "zsh":
        return lines[1::3]
    return [line.partition(",")[2].partition("\t")[0] for line in lines]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["tasks", "--project", "se"], ["search", "second"]),
        (["submit", "read", "--agent", ""], ["coder-1"]),
        (["submit", "read", "--target", "e"], ["echo"]),
        (["tasks", "--project", "nobody"], []),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_of_the_service_complete(
    service: ServiceProcess, shell: str, words: list[str], names: list[str]
) -> None:
    assert completed(service.address, *words, shell=shell) == names


def test_tasks_complete_by_their_ids(service: ServiceProcess) -> None:
    with SyncClient(service.address) as client:
        task_id = client.submit(action="read", agent_id="coder-1", target="echo").task_id
    assert task_id in completed(service.address, "show", task_id[:4])


def test_bash_completes_the_part_of_a_budget_after_the_colon(service: ServiceProcess) -> None:
    whole = completed(service.address, "tasks", "--scope", "sess")
    assert whole == ["session:eval", "session:nightly"]
    # Bash takes the colon for the end of a word, and replaces what comes after it.
    assert completed(service.address, "tasks", "--scope", "session", ":") == ["eval", "nightly"]
    assert completed(service.address, "tasks", "--scope", "session", ":", "ni") == ["nightly"]


def test_the_service_that_the_line_names_is_asked(service: ServiceProcess) -> None:
    nowhere = "http://127.0.0.1:1"
    words = ["tasks", "--url", service.address, "--project", "ev"]
    assert completed(nowhere, *words, shell="zsh") == ["evals"]
    # Bash gives the address in pieces, which are put together again.
    pieces = [piece for piece in re.split("(:)", service.address) if piece]
    assert completed(nowhere, "tasks", "--url", *pieces, "--project", "ev") == ["evals"]


def test_where_nothing_answers_completion_is_empty_and_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        assert completed(address, "tasks", "--project", "", answer_seconds=ANSWER_SECONDS) == []
        assert time.monotonic() - started < ANSWER_SECONDS + 25
    assert completed("http://127.0.0.1:1", "tasks", "--project", "") == []
    assert completed("no address", "tasks", "--project", "") == []


def test_commands_complete_without_being_loaded() -> None:
    assert completed("", "comp") == ["completion"]
    statement = (
        "import sys; from headgate.cli.main import cli, COMMANDS; import click; "
        "found = cli.shell_complete(click.Context(cli), ''); assert len(found) == len(COMMANDS); "
        "assert not [name for name in COMMANDS if f'headgate.cli.{name}' in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", statement], check=True)


def leaves(command: click.Command, path: str = "headgate") -> Iterator[tuple[str, click.Command]]:
    """Give every command that is none of a group's."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from leaves(inner, f"{path} {name}")


def test_whatever_takes_a_name_of_the_service_completes_it() -> None:
    found = {
        (path, parameter.name): parameter.type
        for path, command in leaves(cli)
        for parameter in command.params
        if parameter.name in NAMED
    }
    assert len(found) > len(NAMED)
    assert len(COMMANDS) > 30
    assert [place for place, kind in found.items() if not isinstance(kind, ServiceName)] == []
