"""From the body of a request to tasks that can be submitted.

Rule: whatever bytes come in, the answer is a draft or an `InvalidTaskError`, and nothing else is
raised. Nothing here waits, reads a clock or asks a store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeVar

import msgspec

from headgate.config.settings import (
    DEFAULT_PROJECT,
    AgentSettings,
    ProjectSettings,
    Settings,
)
from headgate.core.budgets.scopes import (
    MAX_REMEMBERED_LENGTH,
    ROOT,
    Scope,
    charged_scopes,
    parse_scope,
)
from headgate.core.lifecycle import IN_THE_PAST, INVALID_FORMAT, parse_rfc3339
from headgate.core.money import to_micro_usd, to_tokens
from headgate.core.snapshot import (
    BUILT_IN_AGENT,
    MAX_PRIORITY,
    MAX_WEIGHT,
    RESERVED,
    ProjectStatus,
    Standing,
)
from headgate.core.task import (
    ATTEMPT_SECONDS,
    MAX_ATTEMPT_SECONDS,
    MAX_ATTEMPTS,
    NO_JSON,
    Draft,
    OnExhausted,
    OnParentFailure,
    Submission,
    Task,
    TaskRecord,
    Terms,
)
from headgate.core.text import (
    VERY_NEAR,
    DeepJsonError,
    Steps,
    at_once,
    did_you_mean,
    json_steps,
    nearest,
)
from headgate.errors import InvalidAmountError, InvalidScopeError, InvalidTaskError
from headgate.executors.targets import Target
from headgate.storage.tokens import UNBOUND, Bounds

# The bodies as clients send them, and what is wrong where one does not fit. Fields that nobody
# knows are ignored, as clients of other versions may send them. One that looks like a known field
# is refused instead: a task whose `dedline` is ignored would run for too long.

MAX_FIELDS = 64
MAX_PLAIN_BYTES = 128 * 1024
"""How much a body may have beside texts and values that are kept as they are, such as `input`."""
_EXCERPT_CHARACTERS = 60
_MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`")
_TOKEN = re.compile(r"hg_[0-9a-f]{12}_[0-9a-f]+")
_UNKNOWN_FIELD = "Object contains unknown field"


class EstimateBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a task is expected to use."""

    tokens: int | None = None
    """Tokens that the task is expected to use."""
    usd: int | float | str | None = None
    """Dollars that it is expected to use, as a number or a string."""


class TaskBody(msgspec.Struct, rename="camel"):
    """One task as a client writes it. Nothing is required here; what is missing is judged later.

    `params` and `input` are kept unread. They are not optional types, because the decoder reads
    nothing but null into an optional raw value; empty is absent.
    """

    agent_id: str | None = None
    """The agent whose lane the task waits in. Required unless `projectId` is given; then any agent
    that accepts open tasks may run it."""
    action: str | None = None
    """What to do. Required unless `input` is given."""
    tab_id: str | None = None
    """For the target: the tab to act on."""
    selector: str | None = None
    """For the target: up to 4,096 characters."""
    ref: str | None = None
    """For the target: an element."""
    params: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """For the target: an object."""
    priority: int | None = None
    """Lower goes first. The default is 0."""
    deadline: str | None = None
    """When the task must have ended. The default is none, or `default_deadline_seconds` from when
    it may start."""
    callback_url: str | None = None
    """Who gets a webhook when the task has ended: `http` or `https`, up to 2,048 characters, no
    user name, no private address."""
    project_id: str | None = None
    """A project of the configuration. The default is `default`."""
    target: str | None = None
    """A target of the configuration. The default is that of its agent, or the default target."""
    slot: str | None = None
    """A key slot, in place of what the target says. The task waits while the slot has no room."""
    provider: str | None = None
    """Any slot of this provider: the one with the most room when the task starts. Not beside
    `slot`."""
    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """For the target: any JSON."""
    weight: float | None = None
    """A proxy for cost where tokens are unknown. The default is 1. A claim unless the token has
    `admin`."""
    estimate: EstimateBody | None = None
    """What the task is expected to use. It is reserved before the task starts. A claim unless the
    token has `admin`."""
    cost_usd: int | float | str | None = None
    """What each attempt costs, whatever the work reports. An attempt that did not begin costs
    nothing. Not beside `estimate.usd`. A claim unless the token has `admin` or the target has
    `trusts_cost`."""
    scopes: list[str] | None = None
    """Up to 16 budget scopes besides that of its project."""
    depends_on: list[str] | None = None
    """Up to 100 ids of tasks that must end first."""
    on_parent_failure: OnParentFailure | None = None
    """What to do if one of those did not succeed: `fail` (the default) or `run`."""
    not_before: str | None = None
    """When the task may start. Until then it counts against `max_scheduled` and not in the queue.
    """
    labels: dict[str, str] | None = None
    """Up to 32 strings of at most 256 characters, under keys of up to 64 characters."""
    max_attempts: int | None = None
    """How often it may fail before it has failed for good, 1 to 100."""
    timeout_seconds: float | None = None
    """How long one attempt may take, up to 604,800 (7 days). The default is
    `attempt_timeout_seconds`, an hour."""
    on_exhausted: OnExhausted | None = None
    """What to do if a budget has no room now but will have: `wait` (the default) or `reject`."""


class BatchBody(msgspec.Struct, rename="camel"):
    """Several tasks, with what they share."""

    agent_id: str | None = None
    """The agent of tasks that name none."""
    callback_url: str | None = None
    """The webhook of tasks that name none."""
    project_id: str | None = None
    """The project of tasks that name none. The batch needs this or `agentId`."""
    tasks: list[msgspec.Raw] | None = None
    """1 to 50 tasks."""


class _StrictTaskBody(TaskBody, rename="camel", forbid_unknown_fields=True):
    pass


class _StrictBatchBody(BatchBody, rename="camel", forbid_unknown_fields=True):
    pass


MAX_BATCH = 50

if TYPE_CHECKING:

    class _FirstTasks(msgspec.Struct):
        pass
else:
    # One more than a batch may have; what follows is passed over.
    _FirstTasks = msgspec.defstruct(
        "_FirstTasks",
        [
            (f"task{n}", msgspec.Raw, msgspec.field(default_factory=msgspec.Raw))
            for n in range(MAX_BATCH + 1)
        ],
        array_like=True,
    )


class _Outline(msgspec.Struct):
    """What may be long in a body, unread."""

    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    params: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    result: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    error: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    tasks: _FirstTasks | None = None


_outlines = msgspec.json.Decoder(_Outline)


def check_outline(body: bytes | msgspec.Raw) -> None:
    """Refuse a large body with more than a few long values, before it is parsed.

    To pass over a megabyte takes some milliseconds, to make a list of its 300,000 entries ten times
    as long. What is malformed is left to the parser, which says where.
    """
    if len(bytes(body)) <= MAX_PLAIN_BYTES:
        return
    try:
        outline = _outlines.decode(body)
    except (ValueError, RecursionError):
        return
    tasks = () if outline.tasks is None else msgspec.structs.astuple(outline.tasks)
    if tasks and tasks[-1]:
        message = f"a batch has at most {MAX_BATCH} tasks, and this one has more"
        raise InvalidTaskError("batch_too_large", "tasks", message)
    long_values = (outline.input, outline.params, outline.result, outline.error, *tasks)
    if len(bytes(body)) - sum(len(bytes(one)) for one in long_values) > MAX_PLAIN_BYTES:
        kept = "params, input, result and error"
        problem = f"the body has more than {MAX_PLAIN_BYTES:,} bytes beside {kept}"
        raise InvalidTaskError("body_too_large", "", f"{problem}; leave out what is not needed")


Body = TypeVar("Body", bound=msgspec.Struct)
Small = TypeVar("Small", bound=msgspec.Struct)

_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(kind))


TASK_FIELDS = _fields(TaskBody)
BATCH_FIELDS = _fields(BatchBody)


class BodyReader:
    """Decodes bodies; the strict decoder is tried first because it costs nothing extra."""

    def __init__(self) -> None:
        self._strict_task = msgspec.json.Decoder(_StrictTaskBody)
        self._task = msgspec.json.Decoder(TaskBody)
        self._strict_batch = msgspec.json.Decoder(_StrictBatchBody)
        self._batch = msgspec.json.Decoder(BatchBody)

    def task(self, body: bytes | msgspec.Raw) -> TaskBody:
        """Read one task, or raise `InvalidTaskError`."""
        check_outline(body)
        try:
            return self._strict_task.decode(body)
        except (ValueError, RecursionError) as error:
            if not str(error).startswith(_UNKNOWN_FIELD):
                raise _body_error(error) from None
        return _lenient(self._task, body, TASK_FIELDS)

    def batch(self, body: bytes) -> BatchBody:
        """Read a batch whose tasks are still unread, or raise `InvalidTaskError`."""
        check_outline(body)
        try:
            return self._strict_batch.decode(body)
        except (ValueError, RecursionError) as error:
            if not str(error).startswith(_UNKNOWN_FIELD):
                raise _body_error(error) from None
        return _lenient(self._batch, body, BATCH_FIELDS)


def read_body(body: bytes, kind: type[Small]) -> Small:
    """Read a body that is not a task, or raise `InvalidTaskError`."""
    check_outline(body)
    decoder: msgspec.json.Decoder[Small]
    decoder, known = _small(kind)
    return _lenient(decoder, body, known)


@cache
def _small(kind: type[msgspec.Struct]) -> tuple[msgspec.json.Decoder[Any], tuple[str, ...]]:
    """Return the decoder of a kind of body and its fields, which take long to ask for."""
    return msgspec.json.Decoder(kind), _fields(kind)


def check_unknown(names: Iterable[str], known: tuple[str, ...]) -> None:
    """Raise `InvalidTaskError` for a name that is almost that of a known field."""
    unknown = [name for name in names if name not in known]
    if len(unknown) > MAX_FIELDS:
        problem = f"{len(unknown)} fields are unknown, at most {MAX_FIELDS} are passed over"
        raise InvalidTaskError("unknown_field", excerpt(unknown[0]), problem)
    for name in unknown:
        meant = _almost(excerpt(name), known)
        if meant:
            message = f"unknown field '{excerpt(name)}'; {did_you_mean(meant)}"
            raise InvalidTaskError("unknown_field", excerpt(name), message)


def excerpt(text: str) -> str:
    """Return as much of a client's text as fits in a message, and no token that is in it."""
    if "hg_" in text:
        text = _TOKEN.sub("hg_…", text)
    return text if len(text) <= _EXCERPT_CHARACTERS else f"{text[:_EXCERPT_CHARACTERS]}…"


def _lenient(
    decoder: msgspec.json.Decoder[Body], body: bytes | msgspec.Raw, known: tuple[str, ...]
) -> Body:
    try:
        str(body, "utf-8")  # The decoder does not look at the text of fields that it passes over.
        check_unknown(_NAMES.decode(body), known)
        return decoder.decode(body)
    except InvalidTaskError:
        raise
    except (ValueError, RecursionError) as error:
        raise _body_error(error) from None


@lru_cache(maxsize=1024)
def _almost(name: str, known: tuple[str, ...]) -> str:
    return nearest(name, known, cutoff=VERY_NEAR)


def _body_error(error: Exception) -> InvalidTaskError:
    if isinstance(error, RecursionError):
        return InvalidTaskError("bad_json", "", "the body is nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        return InvalidTaskError("bad_json", "", f"the body is not JSON: {excerpt(str(error))}")
    missing = _MISSING_FIELD.match(str(error))
    if missing is not None:
        message = f"missing required field '{missing[1]}'"
        return InvalidTaskError("missing_field", missing[1], message)
    problem, _, place = str(error).partition(" - at ")
    field = place.strip("`").removeprefix("$").removeprefix(".")
    if not field:
        return InvalidTaskError("bad_json", "", "the body must be a JSON object")
    return InvalidTaskError("invalid_field", field, f"field '{field}': {_plain(problem)}")


def _plain(problem: str) -> str:
    text = problem.replace(" | null", "").replace("`", "")
    return excerpt(text[:1].lower() + text[1:])


# The rules of single fields: each function returns the value to keep, or raises `InvalidTaskError`.
# Whatever passes here fits every store, every ledger and every log line: texts are bounded
# and printable, times are within the calendar, amounts within what a reservation can hold.

MAX_ID_LENGTH = 128
MAX_SELECTOR_LENGTH = 4096
MAX_URL_LENGTH = 2048
MAX_LABELS = 32
MAX_LABEL_KEY_LENGTH = 64
MAX_LABEL_VALUE_LENGTH = 256
MAX_PARENTS = 100
MAX_SCOPES = 16
MAX_DEPTH = 64

NOT_KEPT = "the task was refused when it came, and what it was to do was not kept; send it again"
LATEST = 253_086_768_000.0
"""The latest time that is taken, in the year 9990: what is reckoned from it can be written, too."""

_URL = re.compile(r"https?://[^\s/?#@]+(?:[/?#]\S*)?", re.IGNORECASE | re.ASCII)


def reject_field(field: str, problem: str) -> NoReturn:
    """Raise the error for a field whose value cannot be used."""
    raise InvalidTaskError("invalid_field", field, f"field '{field}': {problem}")


def parse_identifier(text: str, field: str, *, most: int = MAX_ID_LENGTH) -> str:
    """Check a name that ends up in columns, headers and log lines."""
    if len(text) > most:
        reject_field(field, f"has {len(text)} characters, at most {most} are kept")
    if not text:
        reject_field(field, "must not be empty")
    if not text.isprintable() or text[0] == " " or text[-1] == " ":
        reject_field(field, "must be printable, without spaces at its ends")
    return text


def parse_agent_id(text: str) -> str:
    """Check the agent that a task, a worker or a token names."""
    if text == BUILT_IN_AGENT:
        reject_field("agentId", RESERVED)
    return parse_identifier(text, "agentId")


def parse_filter_name(text: str | None, field: str) -> str | None:
    """Check a name that is looked for; nothing is not looked for."""
    return parse_identifier(text, field) if text else None


def parse_selector(text: str) -> str:
    """Check a selector: it may have several lines, but no character that a store cannot keep."""
    if len(text) > MAX_SELECTOR_LENGTH:
        reject_field(
            "selector", f"has {len(text)} characters, at most {MAX_SELECTOR_LENGTH} are kept"
        )
    if "\0" in text:
        reject_field("selector", "contains a null character")
    return text


def parse_callback_url(text: str) -> str:
    """Check the shape of an address that is told of the result."""
    if len(text) > MAX_URL_LENGTH:
        reject_field(
            "callbackUrl", f"has {len(text)} characters, at most {MAX_URL_LENGTH} are kept"
        )
    if not text.isprintable() or not _URL.fullmatch(text):
        reject_field("callbackUrl", "must be an http or https address, without a user name")
    return text


def parse_json_value(raw: msgspec.Raw, field: str) -> Steps[msgspec.Raw | None]:
    """Check that every reader can read this JSON; None if it is absent or null."""
    text = bytes(raw)
    if text in (b"", b"null"):
        return None
    try:
        yield from json_steps(text, levels=MAX_DEPTH)
    except DeepJsonError as error:
        reject_field(field, str(error))
    except (ValueError, RecursionError) as error:
        reject_field(field, f"cannot be read: {excerpt(str(error))}")
    return raw


def parse_json_object(raw: msgspec.Raw, field: str) -> Steps[msgspec.Raw | None]:
    """Check that this is an object; None if it is absent or null."""
    value = yield from parse_json_value(raw, field)
    if value is not None and not bytes(value).startswith(b"{"):
        reject_field(field, "must be an object")
    return value


def parse_deadline(text: str, *, now: float) -> float:
    """Return the Unix seconds of a deadline that a client asked for."""
    seconds = parse_rfc3339(text)
    if seconds is None or seconds > LATEST:
        raise InvalidTaskError("invalid_field", "deadline", INVALID_FORMAT)
    if seconds <= now:
        raise InvalidTaskError("invalid_field", "deadline", IN_THE_PAST)
    return seconds


def parse_not_before(text: str, *, now: float) -> float | None:
    """Return the Unix seconds before which the task may not start; None if that is past."""
    seconds = parse_rfc3339(text)
    if seconds is None or seconds > LATEST:
        reject_field("notBefore", "must be an RFC 3339 time, as in 2030-01-31T12:00:00Z")
    return seconds if seconds > now else None


def parse_priority(value: int) -> int:
    """Check a priority; lower goes first."""
    if abs(value) > MAX_PRIORITY:
        reject_field("priority", f"must be within {MAX_PRIORITY} of 0")
    return value


def parse_weight(value: float) -> float:
    """Check a weight."""
    if not 0 <= value <= MAX_WEIGHT:
        reject_field("weight", f"must be between 0 and {MAX_WEIGHT:.0f}")
    return value


def parse_max_attempts(value: int) -> int:
    """Check a number of attempts."""
    if not 1 <= value <= MAX_ATTEMPTS:
        reject_field("maxAttempts", f"must be between 1 and {MAX_ATTEMPTS}")
    return value


def parse_timeout_seconds(value: float) -> float:
    """Check how long one attempt may take."""
    if not 0 < value <= MAX_ATTEMPT_SECONDS:
        reject_field("timeoutSeconds", f"must be more than 0 and at most {MAX_ATTEMPT_SECONDS:.0f}")
    return value


def parse_estimated_tokens(body: EstimateBody) -> int | None:
    """Return the tokens that were estimated; None is not estimated."""
    if body.tokens is None:
        return None
    try:
        return to_tokens(body.tokens, field="estimate.tokens")
    except InvalidAmountError as error:
        reject_field(error.field, error.problem)


def parse_estimated_micro_usd(body: EstimateBody) -> int | None:
    """Return the micro-dollars that were estimated; None is not estimated."""
    if body.usd is None:
        return None
    try:
        return to_micro_usd(body.usd, field="estimate.usd")
    except InvalidAmountError as error:
        reject_field(error.field, error.problem)


def parse_cost_micro_usd(amount: float | str) -> int:
    """Return the micro-dollars that every attempt costs."""
    try:
        return to_micro_usd(amount, field="costUsd")
    except InvalidAmountError as error:
        reject_field(error.field, error.problem)


def parse_scopes(texts: list[str], own: Scope, bounds: Bounds = UNBOUND) -> tuple[str, ...]:
    """Return the scopes that a task is charged to: its project's own one first, each once."""
    if not texts:
        scopes: tuple[str, ...] = (own,)
    elif sum(map(len, texts)) > MAX_REMEMBERED_LENGTH:
        scopes = _read_scopes(tuple(texts), own)
    else:
        scopes = _remembered_scopes(tuple(texts), own)
    return bind_scopes(scopes, bounds)


# Tasks that come together are charged to the same few scopes.
@lru_cache(maxsize=4_096)
def _remembered_scopes(texts: tuple[str, ...], own: Scope) -> tuple[str, ...]:
    return _read_scopes(texts, own)


def _read_scopes(texts: tuple[str, ...], own: Scope) -> tuple[str, ...]:
    if len(texts) > MAX_SCOPES:
        reject_field("scopes", f"has {len(texts)} entries, at most {MAX_SCOPES} are charged")
    try:
        given = [parse_scope(text, field=f"scopes[{n}]") for n, text in enumerate(texts)]
    except InvalidScopeError as error:
        reject_field(error.field, error.problem)
    _check_reach([own, *given])
    for scope in given:
        if scope.startswith("project:") and scope.partition("/")[0] != own:
            reject_field("scopes", f"'{scope}' is the budget of another project than the task's")
    return tuple(dict.fromkeys([own, *(scope for scope in given if scope != ROOT)]))


def _check_reach(scopes: Iterable[str]) -> None:
    try:
        charged_scopes(ROOT, [Scope(scope) for scope in scopes])
    except InvalidScopeError as error:
        reject_field("scopes", error.problem)


def parse_depends_on(task_ids: list[str]) -> tuple[str, ...]:
    """Return the ids of parents, each once."""
    if len(task_ids) > MAX_PARENTS:
        reject_field("dependsOn", f"has {len(task_ids)} entries, at most {MAX_PARENTS} are kept")
    if "" in task_ids:
        reject_field("dependsOn", "has an empty task id")
    return tuple(dict.fromkeys([parse_identifier(task_id, "dependsOn") for task_id in task_ids]))


def parse_labels(given: dict[str, str]) -> dict[str, str]:
    """Check labels: few, short, printable."""
    if len(given) > MAX_LABELS:
        reject_field("labels", f"has {len(given)} entries, at most {MAX_LABELS} are kept")
    for key, value in given.items():
        if not key or len(key) > MAX_LABEL_KEY_LENGTH or not key.isprintable():
            reject_field(
                "labels", f"a key must be 1 to {MAX_LABEL_KEY_LENGTH} printable characters"
            )
        if len(value) > MAX_LABEL_VALUE_LENGTH or not value.isprintable():
            problem = f"has a value that is not up to {MAX_LABEL_VALUE_LENGTH} printable characters"
            reject_field("labels", f"'{key}' {problem}")
    return given


# Callers whose token is restricted to one agent or project: what a task leaves out is filled in,
# anything else is refused, and nothing is changed silently.


def bind(body: TaskBody | BatchBody, bounds: Bounds) -> None:
    """Fill in whom a task or a batch is for, or raise `InvalidTaskError`."""
    body.agent_id = _bound_name("agentId", body.agent_id, bounds.agent_id)
    body.project_id = _bound_name("projectId", body.project_id, bounds.project_id)
    if isinstance(body, TaskBody) and bounds.least_priority is not None:
        body.priority = _bound_priority(body.priority, bounds.least_priority)


def bind_scopes(scopes: tuple[str, ...], bounds: Bounds) -> tuple[str, ...]:
    """Add the budget of the caller's agent to scopes, after that of the project.

    A further one that is not the caller's own is refused.
    """
    if not bounds.is_bound:
        return scopes
    for scope in scopes[1:]:
        if not bounds.may_charge(Scope(scope)):
            raise _forbidden("scopes", f"the token is not for the budget '{scope}'")
    of_agent = bounds.agent_scope
    if of_agent is None or of_agent in scopes:
        return scopes
    bound = (*scopes[:1], of_agent, *scopes[1:])
    _check_reach(bound)
    return bound


def _bound(task: Task, bounds: Bounds) -> Task:
    """Return a task that is to be sent again as its sender may send it, or refuse it.

    Whoever sends a task may leave out its agent and its priority, and then gets its own; so an
    agent that took an open task sends it for itself, and a task that was more urgent than it may
    ask for is as urgent as that.
    """
    if bounds is UNBOUND:
        return task
    least = bounds.least_priority
    return msgspec.structs.replace(
        task,
        agent_id=_bound_name("agentId", task.agent_id, bounds.agent_id),
        project_id=_bound_name("projectId", task.project_id, bounds.project_id) or "",
        priority=task.priority if least is None else max(task.priority, least),
    )


def _scopes_again(task: Task, bounds: Bounds) -> tuple[str, ...]:
    """Leave out the budget of the agent that sent a task, if it is not that of whoever sends it."""
    sender = Bounds(agent_id=task.agent_id)
    in_project = Bounds(agent_id=task.agent_id, project_id=task.project_id)
    of_sender = (sender.agent_scope, in_project.agent_scope)
    return tuple(
        [one for one in task.scopes if one not in of_sender or bounds.may_charge(Scope(one))]
    )


def _bound_name(field: str, given: str | None, bound: str | None) -> str | None:
    if bound is None or not given or given == bound:
        return bound or given
    raise _forbidden(field, f"the token is for '{bound}' only")


def _bound_priority(given: int | None, least: int) -> int:
    if given is None:
        return max(0, least)
    if given < least:
        raise _forbidden("priority", f"the token is for {least} and higher; lower goes first")
    return given


def _forbidden(field: str, problem: str) -> InvalidTaskError:
    return InvalidTaskError("forbidden", field, f"field '{field}': {problem}")


# The parser.


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a task gets that does not say it; without `deadline_seconds` it gets no deadline."""

    deadline_seconds: float | None = None
    attempt_seconds: float = ATTEMPT_SECONDS
    max_attempts: int = 1


class Draining(msgspec.Struct, frozen=True, kw_only=True):
    """Projects, agents and targets that finish what they have and take no new tasks."""

    projects: frozenset[str] = frozenset()
    agents: frozenset[str] = frozenset()
    targets: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.projects or self.agents or self.targets)


NOTHING_DRAINS = Draining()


class Batch(NamedTuple):
    """The tasks of one request in their order; those that cannot be taken are their errors."""

    entries: list[Draft | InvalidTaskError]


def _having(
    tables: Mapping[str, ProjectSettings | AgentSettings | Target], status: Enum
) -> frozenset[str]:
    return frozenset(name for name, one in tables.items() if one.status is status)


class SubmissionParser:
    """Judges submissions by the projects and targets that exist.

    `targets` maps the name of each target to its slot, or to None where it has none,
    `target_providers` those that name a provider instead to that, and `agent_targets` agents to the
    target of those of their tasks that name none. `slots` maps the name of each slot that is
    configured to its provider. `check_url` says what is wrong with an address that is to be told
    of the end of a task. At the targets in `cost_targets` anybody may state what a task costs.

    What a submitter states who is not trusted is a claim. The task keeps that for good, and a cost
    becomes an estimate: what the work itself reports is booked.
    """

    def __init__(
        self,
        *,
        projects: Iterable[str] = (),
        targets: Mapping[str, str | None],
        default_target: str | None,
        agent_targets: Mapping[str, str] | None = None,
        target_providers: Mapping[str, str] | None = None,
        slots: Mapping[str, str] | None = None,
        cost_targets: Iterable[str] = (),
        slot_projects: Mapping[str, Collection[str]] | None = None,
        defaults: Defaults | None = None,
        draining: Draining = NOTHING_DRAINS,
        check_url: Callable[[str], str | None] | None = None,
    ) -> None:
        self._scopes = {name: parse_scope(f"project:{name}") for name in projects}
        self._scopes.setdefault(DEFAULT_PROJECT, parse_scope(f"project:{DEFAULT_PROJECT}"))
        self._targets = dict(targets)
        self._default_target = default_target
        self._agent_targets = dict(agent_targets or {})
        self._target_providers = dict(target_providers or {})
        self._slots = dict(slots or {})
        self._cost_targets = frozenset(cost_targets)
        self._slot_projects = dict(slot_projects or {})
        self._defaults = defaults or Defaults()
        self._default_terms = Terms(
            max_attempts=self._defaults.max_attempts, attempt_seconds=self._defaults.attempt_seconds
        )
        self._check_url = check_url
        self._draining = draining
        self._bodies = BodyReader()

    @classmethod
    def from_settings(
        cls, settings: Settings, check_url: Callable[[str], str | None] | None = None
    ) -> Self:
        """Return the parser that takes what a service of these settings takes."""
        scheduler = settings.scheduler
        return cls(
            projects=settings.projects,
            targets={name: target.slot for name, target in settings.all_targets.items()},
            default_target=settings.default_target,
            agent_targets=settings.agent_targets,
            target_providers={
                name: target.provider
                for name, target in settings.all_targets.items()
                if target.provider is not None
            },
            slots={name: slot.provider for name, slot in settings.slots.items()},
            cost_targets=[
                name for name, target in settings.all_targets.items() if target.trusts_cost
            ],
            slot_projects={
                name: frozenset(slot.projects)
                for name, slot in settings.slots.items()
                if slot.projects is not None
            },
            defaults=Defaults(
                deadline_seconds=scheduler.default_deadline_seconds,
                attempt_seconds=scheduler.attempt_timeout_seconds,
                max_attempts=scheduler.max_attempts,
            ),
            draining=Draining(
                projects=_having(settings.projects, ProjectStatus.DRAINING),
                agents=_having(settings.agents, Standing.DRAINING),
                targets=_having(settings.targets, Standing.DRAINING),
            ),
            check_url=check_url,
        )

    def knows_project(self, project_id: str) -> bool:
        """Tell whether there is such a project."""
        return project_id in self._scopes

    def project_names(self) -> list[str]:
        """Return the projects that there are, in the order of their names."""
        return sorted(self._scopes)

    def read_task(
        self, body: bytes, *, now: float, bounds: Bounds = UNBOUND, is_trusted: bool = False
    ) -> Draft:
        """Return the task of a request, or raise `InvalidTaskError`.

        `bounds` are those of whoever sends it, and what one that `is_trusted` states is given.
        """
        steps = self.task_steps(body, now=now, bounds=bounds, is_trusted=is_trusted)
        return at_once(steps)

    def task_steps(
        self, body: bytes, *, now: float, bounds: Bounds = UNBOUND, is_trusted: bool = False
    ) -> Steps[Draft]:
        """Read a task in slices."""
        given = self._bodies.task(body)
        return (yield from self._draft(given, now, bounds, is_trusted=is_trusted))

    def read_batch(
        self, body: bytes, *, now: float, bounds: Bounds = UNBOUND, is_trusted: bool = False
    ) -> Batch:
        """Return the tasks of a request; raise `InvalidTaskError` if it is wrong as a whole."""
        steps = self.batch_steps(body, now=now, bounds=bounds, is_trusted=is_trusted)
        return at_once(steps)

    def batch_steps(
        self, body: bytes, *, now: float, bounds: Bounds = UNBOUND, is_trusted: bool = False
    ) -> Steps[Batch]:
        """Read a batch in slices."""
        batch = self._bodies.batch(body)
        bind(batch, bounds)
        _require_agent(batch.agent_id, batch.project_id)
        tasks = batch.tasks or ()
        if not tasks:
            raise InvalidTaskError("batch_empty", "tasks", "a batch needs at least one task")
        if len(tasks) > MAX_BATCH:
            message = f"a batch has at most {MAX_BATCH} tasks, not {len(tasks)}"
            raise InvalidTaskError("batch_too_large", "tasks", message)
        entries: list[Draft | InvalidTaskError] = []
        for raw in tasks:
            entry = yield from self._entry(raw, batch, now, bounds, is_trusted=is_trusted)
            entries.append(entry)
            yield
        return Batch(entries)

    def _entry(
        self, raw: msgspec.Raw, batch: BatchBody, now: float, bounds: Bounds, *, is_trusted: bool
    ) -> Steps[Draft | InvalidTaskError]:
        try:
            body = self._bodies.task(raw)
            body.agent_id = body.agent_id or batch.agent_id
            body.project_id = body.project_id or batch.project_id
            body.callback_url = body.callback_url or batch.callback_url
            return (yield from self._draft(body, now, bounds, is_trusted=is_trusted))
        except InvalidTaskError as error:
            return error

    def _draft(
        self, body: TaskBody, now: float, bounds: Bounds, *, is_trusted: bool
    ) -> Steps[Draft]:
        if bounds is not UNBOUND:
            bind(body, bounds)
        _require_agent(body.agent_id, body.project_id)
        submission = yield from _submission(body)
        draft = Draft(self._task(body, now, bounds), self._terms(body), submission)
        return draft if is_trusted else self._claimed(draft)

    def _claimed(self, draft: Draft) -> Draft:
        """Return a task whose numbers are what somebody claims."""
        task, terms = draft.task, draft.terms
        is_fixed = terms.cost_micro_usd is not None and task.target in self._cost_targets
        if terms.cost_micro_usd is not None and not is_fixed:
            terms = msgspec.structs.replace(
                terms, estimate_micro_usd=terms.cost_micro_usd, cost_micro_usd=None
            )
        task = msgspec.structs.replace(task, has_claims=True, has_usd_estimate=is_fixed)
        return draft._replace(task=task, terms=terms)

    def _task(self, body: TaskBody, now: float, bounds: Bounds) -> Task:
        project_id = body.project_id or DEFAULT_PROJECT
        own = self._own_scope(project_id)
        target = self._target(body.target, body.agent_id)
        if self._draining:
            self._check_taken(project_id, body.agent_id, target)
        slot, provider = self._slot(body.slot, body.provider, target, project_id)
        not_before = parse_not_before(body.not_before, now=now) if body.not_before else None
        return Task(
            project_id=project_id,
            agent_id=parse_agent_id(body.agent_id) if body.agent_id else None,
            priority=parse_priority(body.priority) if body.priority else 0,
            weight=1.0 if body.weight is None else parse_weight(body.weight),
            created_at=now,
            estimate_tokens=parse_estimated_tokens(body.estimate) if body.estimate else None,
            deadline=self._deadline(body.deadline, now, not_before),
            not_before=not_before,
            scopes=parse_scopes(body.scopes or [], own, bounds),
            target=target,
            slot=slot,
            provider=provider,
            has_usd_estimate=body.cost_usd is not None
            or (body.estimate is not None and body.estimate.usd is not None),
        )

    def _own_scope(self, project_id: str) -> Scope:
        try:
            return self._scopes[project_id]
        except KeyError:
            message = f"unknown project '{excerpt(project_id)}'"
            raise InvalidTaskError("unknown_project", "projectId", message) from None

    def _target(self, name: str | None, agent_id: str | None) -> str:
        wanted = name or self._agent_targets.get(agent_id or "") or self._default_target
        if wanted is None:
            message = "missing required field 'target': there is no default target"
            raise InvalidTaskError("missing_field", "target", message)
        if wanted not in self._targets:
            raise InvalidTaskError(
                "unknown_target", "target", f"unknown target '{excerpt(wanted)}'"
            )
        return wanted

    def _slot(
        self, slot: str | None, provider: str | None, target: str, project_id: str
    ) -> tuple[str | None, str | None]:
        """Return the slot or the provider of a task: what it says itself, or what its target says.

        The slot of a target need not be configured; then only limits are counted on it. A slot that
        the project may not use is refused in the words for one that is not there: whoever may not
        name it does not learn of it.
        """
        if slot and provider:
            reject_field("provider", "cannot be named beside a slot; leave one of them out")
        if slot:
            if slot not in self._slots or not self.is_slot_for(slot, project_id):
                message = f"unknown slot '{excerpt(slot)}'{self._of_project(project_id)}"
                raise InvalidTaskError("unknown_slot", "slot", message)
            return slot, None
        if provider:
            if not self._has_slot(provider, project_id):
                of_project = self._of_project(project_id)
                message = f"unknown provider '{excerpt(provider)}': no slot{of_project} has it"
                raise InvalidTaskError("unknown_provider", "provider", message)
            return None, provider
        slot, provider = self._targets[target], self._target_providers.get(target)
        is_granted = slot is None or self.is_slot_for(slot, project_id)
        if provider is not None and provider in self._slots.values():
            is_granted = self._has_slot(provider, project_id)
        if not is_granted:
            message = f"target '{target}' uses a slot that is not for project '{project_id}'"
            raise InvalidTaskError("unknown_slot", "target", f"{message}; name another target")
        return slot, provider

    def is_slot_for(self, slot: str, project_id: str) -> bool:
        """Tell whether work of a project may use a slot."""
        projects = self._slot_projects.get(slot)
        return projects is None or project_id in projects

    def _has_slot(self, provider: str, project_id: str) -> bool:
        return any(
            one == provider and self.is_slot_for(name, project_id)
            for name, one in self._slots.items()
        )

    def _of_project(self, project_id: str) -> str:
        return f" of project '{excerpt(project_id)}'" if self._slot_projects else ""

    def _check_taken(self, project_id: str, agent_id: str | None, target: str) -> None:
        draining = self._draining
        for field, noun, name, names in (
            ("projectId", "project", project_id, draining.projects),
            ("agentId", "agent", agent_id, draining.agents),
            ("target", "target", target, draining.targets),
        ):
            if name in names:
                message = f"{noun} '{excerpt(name or '')}' is draining and takes no new tasks"
                raise InvalidTaskError("draining", field, message)

    def again(
        self,
        record: TaskRecord,
        *,
        now: float,
        bounds: Bounds = UNBOUND,
        is_trusted: bool = False,
    ) -> Draft:
        """Return a task that ended as a new one, with its whole time before it.

        It is judged as if whoever tries it again had sent it today. Its numbers are given where
        both of them are trusted. What it depended on has ended with it.
        """
        task = _bound(record.task, bounds)
        if record.was_refused:
            raise InvalidTaskError("conflict", "", NOT_KEPT)
        own, target = self._own_scope(task.project_id), self._target(task.target, task.agent_id)
        if self._draining:
            self._check_taken(task.project_id, task.agent_id, target)
        own_word = (task.slot, task.provider) if record.terms.names_slot else (None, None)
        slot, provider = self._slot(*own_word, target, task.project_id)
        new = Task(
            project_id=task.project_id,
            agent_id=task.agent_id,
            priority=task.priority,
            weight=task.weight,
            created_at=now,
            estimate_tokens=task.estimate_tokens,
            deadline=self._deadline(None, now, None),
            scopes=bind_scopes(_scopes_again(record.task, bounds) or (own,), bounds),
            target=target,
            slot=slot,
            provider=provider,
            has_usd_estimate=task.has_usd_estimate,
        )
        url = record.terms.callback_url
        terms = msgspec.structs.replace(
            record.terms,
            depends_on=(),
            callback_url=None if url is None else self._callback_url(url),
        )
        draft = Draft(new, terms, msgspec.structs.replace(record.submission, retry_of=task.id))
        return self._claimed(draft) if task.has_claims or not is_trusted else draft

    def _deadline(self, text: str | None, now: float, not_before: float | None) -> float | None:
        if text:
            deadline = parse_deadline(text, now=now)
            if not_before is not None and not_before >= deadline:
                reject_field("notBefore", "is not before the deadline")
            return deadline
        if self._defaults.deadline_seconds is None:
            return None
        # A task that asks to start later has its whole time from then on.
        return (not_before or now) + self._defaults.deadline_seconds

    def _terms(self, body: TaskBody) -> Terms:
        if not (
            body.depends_on
            or body.max_attempts is not None
            or body.timeout_seconds is not None
            or body.estimate is not None
            or body.cost_usd is not None
            or body.on_exhausted is not None
            or body.on_parent_failure is not None
            or body.callback_url
            or body.slot
            or body.provider
            or body.action
        ):
            return self._default_terms
        default = self._default_terms
        attempts, seconds = body.max_attempts, body.timeout_seconds
        return Terms(
            estimate_micro_usd=parse_estimated_micro_usd(body.estimate) if body.estimate else None,
            action=body.action or "",
            max_attempts=default.max_attempts if attempts is None else parse_max_attempts(attempts),
            on_exhausted=body.on_exhausted or default.on_exhausted,
            on_parent_failure=body.on_parent_failure or default.on_parent_failure,
            depends_on=parse_depends_on(body.depends_on) if body.depends_on else (),
            callback_url=self._callback_url(body.callback_url) if body.callback_url else None,
            names_slot=bool(body.slot or body.provider),
            attempt_seconds=(
                default.attempt_seconds if seconds is None else parse_timeout_seconds(seconds)
            ),
            cost_micro_usd=_cost(body),
        )

    def _callback_url(self, text: str) -> str:
        url = parse_callback_url(text)
        problem = self._check_url(url) if self._check_url is not None else None
        if problem is not None:
            reject_field("callbackUrl", problem)
        return url


def _submission(body: TaskBody) -> Steps[Submission]:
    given = (yield from parse_json_value(body.input, "input")) or NO_JSON
    if not body.action and not given:
        raise _missing("action")
    params: msgspec.Raw | None = None
    if body.params:
        params = yield from parse_json_object(body.params, "params")
    return Submission(
        action=parse_identifier(body.action, "action") if body.action else "",
        tab_id=parse_identifier(body.tab_id, "tabId") if body.tab_id else None,
        selector=parse_selector(body.selector) if body.selector else None,
        ref=parse_identifier(body.ref, "ref") if body.ref else None,
        params=params or NO_JSON,
        input=given,
        labels=parse_labels(body.labels) if body.labels else {},
    )


def _cost(body: TaskBody) -> int | None:
    if body.cost_usd is None:
        return None
    if body.estimate is not None and body.estimate.usd is not None:
        reject_field("costUsd", "cannot be named beside estimate.usd; leave one of them out")
    return parse_cost_micro_usd(body.cost_usd)


def _require_agent(agent_id: str | None, project_id: str | None) -> None:
    if not agent_id and not project_id:
        raise _missing("agentId")


def _missing(field: str) -> InvalidTaskError:
    return InvalidTaskError("missing_field", field, f"missing required field '{field}'")
