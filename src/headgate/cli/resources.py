"""`headgate project`, `agent`, `target` and `model`: what the settings name, as it is in force.

A change here holds until the settings file changes that key. Rule: a name that the service does not
know is answered with those that it knows, and with how to add one.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click
import msgspec

from headgate.cli.completion import AGENT, MODEL, PROJECT, SLOT, TARGET, ServiceName
from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import print_json, print_json_lines, print_table, unknown_name
from headgate.core.text import did_you_mean, nearest, printable
from headgate.errors import (
    InvalidFieldError,
    NotAllowedError,
    RequestRefusedError,
    ServiceError,
)

if TYPE_CHECKING:
    from headgate.api.schema.admin import (
        AgentBody,
        ModelBody,
        ProjectBody,
        StandingText,
        TargetBody,
    )
    from headgate.client.sync_client import SyncClient

Verb = Literal["pause", "resume", "drain"]
STATUSES: dict[Verb, Literal["paused", "active", "draining"]] = {
    "pause": "paused",
    "resume": "active",
    "drain": "draining",
}
NO_LIMIT = "none"


class Noun(NamedTuple):
    """A kind of thing that the settings name: how it is asked for, changed and shown."""

    name: str
    kind: ServiceName
    listed: Callable[[SyncClient], Sequence[Any]]
    get: Callable[[SyncClient, str], Any]
    header: tuple[str, ...]
    row: Callable[[Any], tuple[str, ...]]
    advice: str
    change: Callable[[SyncClient, str, StandingText], Any] | None = None

    @property
    def article(self) -> str:
        """The noun with its article."""
        return f"an {self.name}" if self.name[0] in "aeiou" else f"a {self.name}"

    @contextmanager
    def naming_known(
        self, client: SyncClient, name: str, code: str = "not_found"
    ) -> Iterator[None]:
        """Have the error about a name that is not there say which ones are, and how to add it.

        Whoever may not list them sees the error of the service.
        """
        try:
            yield
        except RequestRefusedError as error:
            if error.code != code or not name:
                raise
            try:
                known = [_name(one) for one in self.listed(client)]
            except ServiceError:
                raise error from None
            advice = self.advice.format(name=name)
            raise unknown_name(self.name, name, known, advice) from None

    def warn_of_unknown(self, client: SyncClient, name: str) -> None:
        """Warn on standard error that a filter names nothing that there is; say what is meant.

        Whoever may not list what there is hears nothing.
        """
        try:
            known = [_name(one) for one in self.listed(client)]
        except ServiceError:
            return
        if name not in known:
            otherwise = f"headgate {self.name} list shows those that there are"
            line = f"there is no {self.name} {name} now; "
            line += did_you_mean(nearest(name, known), otherwise)
            click.echo(printable(f"headgate: {line}"), err=True)


def _name(thing: Any) -> str:  # noqa: ANN401 - any of the bodies
    found: str = getattr(thing, "id", None) or thing.name
    return found


def _add_list(group: click.Group, noun: Noun, example: str) -> None:
    @group.command(
        "list",
        help=f"List {noun.name}s.",
        epilog=f"\b\nExamples:\n  headgate {noun.name} list\n  {example}",
    )
    @connection_options
    @json_option
    def list_(*, connection: Connection, as_json: bool) -> None:
        with connect(connection) as client:
            found = noun.listed(client)
        if as_json:
            print_json_lines(found)
        elif found:
            print_table(f"{noun.name.capitalize()}s", noun.header, [noun.row(one) for one in found])
        else:
            advice = noun.advice.format(name="NAME")
            click.echo(f"headgate: There are no {noun.name}s at {client.url}. {advice}", err=True)


def _add_show(group: click.Group, noun: Noun, example: str) -> None:
    @group.command(
        "show",
        help=f"Show everything about {noun.article}.",
        epilog=f"\b\nExamples:\n  headgate {noun.name} show {example}",
    )
    @click.argument("name", metavar=noun.name.upper(), type=noun.kind)
    @connection_options
    @json_option
    def show(*, name: str, connection: Connection, as_json: bool) -> None:
        with connect(connection) as client, noun.naming_known(client, name):
            _print_one(noun.get(client, name), as_json=as_json)


_HELP: dict[Verb, str] = {
    "pause": "Pause {article}: none of its waiting tasks start.\n\nRunning tasks go on.",
    "resume": "Resume {article}.\n\nThis also ends a closure by a worker or a target's answer.",
    "drain": "Drain {article}: it accepts no new tasks and finishes those it has.",
}
_DONE: dict[Verb, str] = {
    "pause": "is paused: none of its waiting tasks start; running ones go on. "
    "headgate {noun} resume {name} ends this.",
    "resume": "is active.",
    "drain": "drains: it accepts no new tasks and finishes those it has.",
}


def _add_verbs(group: click.Group, noun: Noun, example: str) -> None:
    for verb in STATUSES:
        _add_verb(group, noun, verb, example)


def _add_verb(group: click.Group, noun: Noun, verb: Verb, example: str) -> None:
    text = _HELP[verb].format(article=noun.article)
    if noun.name == "project":
        text = text.replace("\n\nThis also ends a closure by a worker or a target's answer.", "")

    @group.command(
        verb,
        help=text,
        epilog=f"\b\nExamples:\n  headgate {noun.name} {verb} {example}",
    )
    @click.argument("name", metavar=noun.name.upper(), type=noun.kind)
    @connection_options
    @json_option
    def change(*, name: str, connection: Connection, as_json: bool) -> None:
        assert noun.change is not None  # noqa: S101 - only such a noun has the verbs
        with connect(connection) as client, noun.naming_known(client, name):
            # An agent comes with its first change; one that nobody knows is a mistake here.
            noun.get(client, name)
            answer = noun.change(client, name, STATUSES[verb])
            if verb == "resume" and getattr(answer, "closures", None):
                client.open(noun.name, name)  # type: ignore[arg-type]  # an agent or a target
                answer = noun.get(client, name)
        if as_json:
            print_json(answer)
        else:
            done = _DONE[verb].format(noun=noun.name, name=name)
            click.echo(printable(f"{noun.name.capitalize()} {name} {done}"))


def _print_one(thing: msgspec.Struct, *, as_json: bool) -> None:
    if as_json:
        print_json(thing)
        return
    fields = [(name, _text(value)) for name, value in msgspec.structs.asdict(thing).items()]
    shown = [(name.replace("_", " "), text) for name, text in fields if text]
    width = max(len(name) for name, _ in shown)
    for name, text in shown:
        click.echo(f"{name:<{width}}  {printable(text)}")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(one) for one in value)
    if isinstance(value, float):
        return f"{value:g}"
    why = getattr(value, "why", None)
    return "" if value is None else str(value if why is None else why)


# Values of options that take a limit away with `none`.


class Limit(click.types.StringParamType):
    """A number, or `none` for no limit."""

    name = "number"

    def __init__(self, read: Callable[[str], float]) -> None:
        self._read = read

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click has it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:  # noqa: ANN401 - as click has it
        """Return the number; None is `none`."""
        if value == NO_LIMIT or value is None:
            return NO_LIMIT
        try:
            return self._read(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor {NO_LIMIT}", param, ctx)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, with None where a limit is taken away."""
    return {
        name: None if value == NO_LIMIT else value
        for name, value in options.items()
        if value is not None
    }


def check_given(change: dict[str, Any], reset: Sequence[str]) -> None:
    if not change and not reset:
        raise InvalidFieldError("options", "say what to change; --help lists the options")


# Projects.


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _project_row(one: ProjectBody) -> tuple[str, ...]:
    return (
        one.id,
        one.status,
        f"{one.credit_weight:g}",
        _share(one.target_share),
        _share(one.actual_share),
        str(one.queued),
        str(one.inflight),
        NO_LIMIT if one.max_concurrent_agents is None else str(one.max_concurrent_agents),
    )


PROJECTS = Noun(
    "project",
    PROJECT,
    lambda client: client.list_projects().projects,
    lambda client, name: client.get_project(name),
    ("project", "status", "weight", "target", "actual", "queued", "running", "max agents"),
    _project_row,
    "Add one as [projects.{name}] in the settings file, then run headgate reload.",
    lambda client, name, status: client.change_project(name, status=status),
)


@click.group()
def project() -> None:
    """List, change, pause, resume and drain projects.

    A project's weight decides its share of all agents. [projects.NAME] in the settings file adds a
    project. A change made here holds until you change the same key in that file.
    """


_PROJECT_FIELDS = {
    "weight": "credit_weight",
    "max-agents": "max_concurrent_agents",
    "budget-tokens": "budget_limit",
    "status": "status",
}

_add_list(project, PROJECTS, "headgate project list --json | jq -r 'select(.queued > 0) | .id'")
_add_show(project, PROJECTS, "evals")


@project.command(
    "set",
    epilog="""\b
Examples:
  headgate project set evals --weight 2 --max-agents 8
  headgate project set evals --max-agents none
  headgate project set evals --reset weight
""",
)
@click.argument("name", metavar="PROJECT", type=PROJECT)
@click.option(
    "--weight",
    type=float,
    metavar="NUMBER",
    help="The project's share, relative to other projects.",
)
@click.option(
    "--max-agents",
    type=Limit(int),
    metavar="N|none",
    help="The most tasks of the project in flight.",
)
@click.option(
    "--budget-tokens",
    type=Limit(int),
    metavar="N|none",
    help="The most tokens that the project may use in the usage window.",
)
@click.option(
    "--reset",
    multiple=True,
    type=click.Choice(list(_PROJECT_FIELDS)),
    help="Return to the value in the settings file.",
)
@connection_options
@json_option
def set_project(
    *,
    name: str,
    weight: float | None,
    max_agents: Any,  # noqa: ANN401 - a number, or none
    budget_tokens: Any,  # noqa: ANN401
    reset: tuple[str, ...],
    connection: Connection,
    as_json: bool,
) -> None:
    """Change a project: its weight and its limits."""
    change = given(
        {
            "credit_weight": weight,
            "max_concurrent_agents": max_agents,
            "budget_limit": budget_tokens,
        }
    )
    check_given(change, reset)
    with connect(connection) as client, PROJECTS.naming_known(client, name):
        answer = client.change_project(
            name, reset=[_PROJECT_FIELDS[one] for one in reset], **change
        )
        _print_changed(client, "Project", answer, as_json=as_json)


def _print_changed(
    client: SyncClient,
    noun: str,
    thing: ProjectBody | AgentBody | TargetBody,
    *,
    as_json: bool,
    is_new: bool = False,
) -> None:
    if not as_json:
        done = "Added" if is_new else "Changed"
        click.echo(printable(f"{done} {noun.lower()} {thing.id} at {client.url}:"))
    _print_one(thing, as_json=as_json)


_add_verbs(project, PROJECTS, "evals")


# Agents.


def _agent_row(one: AgentBody) -> tuple[str, ...]:
    return (
        one.id,
        one.status,
        one.type,
        str(one.capacity),
        "yes" if one.accepts_open else "no",
        str(one.queued),
        str(one.inflight),
        "; ".join(closure.why for closure in one.closures),
    )


AGENTS = Noun(
    "agent",
    AGENT,
    lambda client: client.list_agents().agents,
    lambda client, name: client.get_agent(name),
    ("agent", "status", "type", "capacity", "open tasks", "queued", "running", "closed"),
    _agent_row,
    "Its first task adds it, or [agents.{name}] in the settings file, or headgate agent set {name} "
    "--capacity N.",
    lambda client, name, status: client.change_agent(name, status=status),
)


@click.group()
def agent() -> None:
    """List, change, pause, resume and drain agents.

    An agent takes as many tasks at once as its capacity says. A change made here holds until you
    change the same key in the settings file.
    """


_AGENT_FIELDS = {
    "capacity": "capacity",
    "type": "type",
    "accepts-open": "accepts_open",
    "status": "status",
}

_add_list(agent, AGENTS, "headgate agent list --json | jq -r 'select(.queued > 0) | .id'")
_add_show(agent, AGENTS, "coder-1")


@agent.command(
    "set",
    epilog="""\b
Examples:
  headgate agent set coder-1 --capacity 4
  headgate agent set coder-1 --accepts-open --type claude-code
  headgate agent set coder-1 --reset capacity
""",
)
@click.argument("name", metavar="AGENT", type=AGENT)
@click.option(
    "--capacity",
    type=Limit(int),
    metavar="N|none",
    help="The most tasks that the agent runs at once.",
)
@click.option("--type", "agent_type", metavar="TYPE", help="The type that rate limits name.")
@click.option(
    "--accepts-open/--no-accepts-open",
    default=None,
    help="Whether the agent runs tasks that name no agent.",
)
@click.option(
    "--reset",
    multiple=True,
    type=click.Choice(list(_AGENT_FIELDS)),
    help="Return to the value in the settings file.",
)
@connection_options
@json_option
def set_agent(
    *,
    name: str,
    capacity: Any,  # noqa: ANN401 - a number, or none
    agent_type: str | None,
    accepts_open: bool | None,
    reset: tuple[str, ...],
    connection: Connection,
    as_json: bool,
) -> None:
    """Change an agent, or add one: its capacity, its type, whether it takes open tasks."""
    change = given({"capacity": capacity, "type": agent_type, "accepts_open": accepts_open})
    check_given(change, reset)
    with connect(connection) as client:
        is_new = _is_new_agent(client, name, has_change=bool(change))
        answer = client.change_agent(name, reset=[_AGENT_FIELDS[one] for one in reset], **change)
        _print_changed(client, "Agent", answer, as_json=as_json, is_new=is_new)
        if is_new:
            names = [one.id for one in client.list_agents().agents if one.id != name]
            meant = did_you_mean(nearest(name, names))
            resets = " ".join(
                f"--reset {option}" for option, field in _AGENT_FIELDS.items() if field in change
            )
            remove = f"headgate agent set {shlex.quote(name)} {resets} removes it again."
            line = f"{name} is a new agent; {meant} {remove}" if meant else remove
            click.echo(printable(f"headgate: {line}"), err=True)


def _is_new_agent(client: SyncClient, name: str, *, has_change: bool) -> bool:
    """Tell whether a change adds an agent; to go back to the file with an unknown one is refused.

    Whoever may change agents and not see them is told of none.
    """
    try:
        with nullcontext() if has_change else AGENTS.naming_known(client, name):
            client.get_agent(name)
    except RequestRefusedError as error:
        if error.code != "not_found":
            raise
        return True
    except NotAllowedError:
        pass
    return False


_add_verbs(agent, AGENTS, "coder-1")


# Targets.


def _target_row(one: TargetBody) -> tuple[str, ...]:
    return (
        f"{one.id} (default)" if one.default else one.id,
        one.kind,
        one.status,
        one.slot or "",
        one.provider or "",
        "; ".join(closure.why for closure in one.closures),
    )


TARGETS = Noun(
    "target",
    TARGET,
    lambda client: client.list_targets().targets,
    lambda client, name: client.get_target(name),
    ("target", "kind", "status", "slot", "provider", "closed"),
    _target_row,
    "Add one as [targets.{name}] in the settings file, then run headgate reload.",
    lambda client, name, status: client.change_target(name, status=status),
)


@click.group()
def target() -> None:
    """List, change, pause, resume and drain targets.

    A target is where tasks run: an HTTP address, a program, a worker. [targets.NAME] in the
    settings file adds one. A change made here holds until you change the same key in that file.
    """


_TARGET_FIELDS = {
    "slot": "slot",
    "provider": "provider",
    "estimate-usd": "estimate_usd",
    "estimate-tokens": "estimate_tokens",
    "status": "status",
}


_add_list(target, TARGETS, "headgate target list --json | jq -r .id")
_add_show(target, TARGETS, "browser")


@target.command(
    "set",
    epilog="""\b
Examples:
  headgate target set browser --slot work
  headgate target set browser --estimate-usd 0.02 --estimate-tokens 4000
  headgate target set browser --reset slot
""",
)
@click.argument("name", metavar="TARGET", type=TARGET)
@click.option("--slot", type=SLOT, metavar="SLOT|none", help="The key slot that its tasks use.")
@click.option(
    "--provider", metavar="NAME|none", help="The provider whose slots its tasks get, if no slot."
)
@click.option(
    "--estimate-usd",
    metavar="USD|none",
    help="What to reserve for a task without an estimate.",
)
@click.option(
    "--estimate-tokens",
    type=Limit(int),
    metavar="N|none",
    help="The same in tokens.",
)
@click.option(
    "--reset",
    multiple=True,
    type=click.Choice(list(_TARGET_FIELDS)),
    help="Go back to what the settings file says.",
)
@connection_options
@json_option
def set_target(
    *,
    name: str,
    slot: str | None,
    provider: str | None,
    estimate_usd: str | None,
    estimate_tokens: Any,  # noqa: ANN401 - a number, or none
    reset: tuple[str, ...],
    connection: Connection,
    as_json: bool,
) -> None:
    """Change a target: the slot or provider of its tasks, and what they are expected to cost."""
    change = given(
        {
            "slot": slot,
            "provider": provider,
            "estimate_usd": estimate_usd,
            "estimate_tokens": estimate_tokens,
        }
    )
    check_given(change, reset)
    with connect(connection) as client, TARGETS.naming_known(client, name):
        answer = client.change_target(name, reset=[_TARGET_FIELDS[one] for one in reset], **change)
        _print_changed(client, "Target", answer, as_json=as_json)


_add_verbs(target, TARGETS, "browser")


# Models.


def _model_row(one: ModelBody) -> tuple[str, ...]:
    return (
        one.name,
        ", ".join(one.route),
        _price(one.input_usd_per_million),
        _price(one.output_usd_per_million),
    )


def _price(usd: str | None) -> str:
    return "" if usd is None else f"${usd}"


MODELS = Noun(
    "model",
    MODEL,
    lambda client: client.list_models().models,
    lambda client, name: client.get_model(name),
    ("model", "goes to", "input $/M", "output $/M"),
    _model_row,
    "Name it in models of [upstreams.NAME], or as [models.{name}] with a route, in the settings "
    "file; then run headgate reload.",
)


@click.group()
def model() -> None:
    """Show the models of the gateway: where their calls go, what they cost.

    [models.NAME] in the settings file adds a name, with the upstream models that it stands for.
    """


_add_list(model, MODELS, "headgate model list --json | jq -r .name")
_add_show(model, MODELS, "claude-sonnet-4-5")
