"""`headgate completion`, and the names that the Tab key completes: those of the running service.

A parameter whose name is in `NAMED` completes by itself. One that is called otherwise takes a type
from here: `click.argument("name", type=PROJECT)`. Rule: completion never gets in the way. It writes
no message, and where no service answers within a second, there is nothing to complete.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
)

from headgate.cli.main import COMPLETE_VARIABLE
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from headgate.client.sync_client import SyncClient

SHELLS = ("bash", "zsh", "fish")
ANSWER_SECONDS = 1.0
MOST_NAMES = 100

Names = Iterable[tuple[str, str]]
"""Names as they are typed, each with a few words about it."""


@click.command(
    epilog="""\b
Examples:
  eval "$(headgate completion bash)"           in ~/.bashrc
  eval "$(headgate completion zsh)"            in ~/.zshrc
  headgate completion fish > ~/.config/fish/completions/headgate.fish
"""
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.option("--json", "as_json", is_flag=True, help="Write the script as JSON.")
@click.pass_context
def completion(context: click.Context, *, shell: str, as_json: bool) -> None:
    """Print a script that completes commands, options and names with Tab.

    Names of projects, agents, targets, slots, models, budgets and tasks come from the running
    service.
    """
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - the choice has no other shell
    root = context.find_root()
    script = kind(root.command, {}, "headgate", COMPLETE_VARIABLE).source()
    if as_json:
        from headgate.cli.output import print_json  # noqa: PLC0415

        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)


class ServiceName(click.types.StringParamType):
    """The name of something that the service knows, or a new one: any text is taken."""

    def __init__(self, names: Callable[[SyncClient], Names]) -> None:
        self._names = names

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002 - as click has it
        incomplete: str,
    ) -> list[CompletionItem[str]]:
        """Return the names that begin like this, as far as the service tells them in time."""
        found: list[CompletionItem[str]] = []

        def ask() -> None:
            from headgate.cli.connection import Connection, connect  # noqa: PLC0415

            data = ctx.params.get("data")
            connection = Connection(
                url=ctx.params.get("url"),
                token=ctx.params.get("token"),
                data=None if data is None else Path(data),
            )
            try:
                with connect(connection, retries=0, timeout_seconds=ANSWER_SECONDS) as client:
                    names = list(self._names(client))
            except (HeadgateError, OSError):
                return
            matching = [(name, help_) for name, help_ in names if name.startswith(incomplete)]
            found.extend(CompletionItem(name, help=help_) for name, help_ in matching[:MOST_NAMES])

        # To look up the name of a host takes as long as it takes, so the question is left behind.
        thread = threading.Thread(target=ask, daemon=True)
        with redirect_stderr(io.StringIO()):
            thread.start()
            thread.join(ANSWER_SECONDS)
        return list(found)


def _projects(client: SyncClient) -> Names:
    return [(one.id, one.status) for one in client.list_projects().projects]


def _agents(client: SyncClient) -> Names:
    return [(one.id, one.status) for one in client.list_agents().agents]


def _targets(client: SyncClient) -> Names:
    return [(one.id, one.kind) for one in client.list_targets().targets]


def _slots(client: SyncClient) -> Names:
    return [(one.name, one.state) for one in client.slots().slots]


def _models(client: SyncClient) -> Names:
    return [(one.name, ", ".join(one.route)) for one in client.list_models().models]


def _budgets(client: SyncClient) -> Names:
    for one in client.list_budgets().budgets:
        limits = [
            "" if one.limit_usd is None else f"${one.limit_usd}",
            "" if one.limit_tokens is None else f"{one.limit_tokens} tokens",
        ]
        if one.scope:
            yield one.scope, " and ".join(filter(None, limits)) or "no limit"


def _tasks(client: SyncClient) -> Names:
    return [
        (one.task_id, f"{one.state} {one.action}".strip())
        for one in client.list_tasks(limit=MOST_NAMES).tasks
    ]


PROJECT = ServiceName(_projects)
AGENT = ServiceName(_agents)
TARGET = ServiceName(_targets)
SLOT = ServiceName(_slots)
BUDGET = ServiceName(_budgets)
MODEL = ServiceName(_models)
TASK = ServiceName(_tasks)

NAMED = {
    "agent": AGENT,
    "agent_id": AGENT,
    "budget": BUDGET,
    "depends_on": TASK,
    "model": MODEL,
    "project": PROJECT,
    "project_id": PROJECT,
    "scope": BUDGET,
    "scopes": BUDGET,
    "slot": SLOT,
    "target": TARGET,
    "task": TASK,
    "task_id": TASK,
    "task_ids": TASK,
}


def with_names(command: click.Command) -> click.Command:
    """Have the parameters of a command, and of those in it, complete what their names say."""
    for parameter in command.params:
        kind = NAMED.get(parameter.name or "")
        if kind is not None and parameter.type is click.STRING:
            parameter.type = kind
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            with_names(inner)
    return command


class _Bash(BashComplete):
    """Completion in bash, which takes the colon in the name of a budget for the end of a word."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor and the one at it, with colons put back together."""
        before, incomplete = super().get_completion_args()
        words: list[str] = []
        for word in [*before, incomplete]:
            if words and (word.startswith(":") or words[-1].endswith(":")):
                words[-1] += word
            else:
                words.append(word)
        self._typed = words[-1]
        return words[:-1], words[-1]

    def format_completion(self, item: CompletionItem[str]) -> str:
        """Return what bash puts in place of the part after the last colon."""
        done = len(self._typed.rpartition(":")[0])
        value = item.value[done + 1 :] if done else item.value
        return f"{item.type},{value}"


def prepare() -> None:
    """Have the words of bash read by our rules; for a process that a shell asks to complete."""
    add_completion_class(_Bash, "bash")
