"""Targets as the configuration writes them: where tasks are executed, and within which bounds.

A target is a table with a `kind`. These types only say what may be written; what a target means is
checked when its executor is built, which needs no network and runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import msgspec

from headgate.core.dispatch_state import TargetEstimate
from headgate.core.money import MAX_RESERVATION_TOKENS, to_micro_usd
from headgate.core.snapshot import Standing

MAX_RESULT_BYTES = 1 << 20
MAX_OUTPUT_BYTES = MAX_RESULT_BYTES // 4
"""Both outputs, and the JSON in one of them, make one result."""
_LARGEST_RESULT_BYTES = 64 << 20

ResultBytes = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST_RESULT_BYTES)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3_600)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Dollars = str | int | float
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_RESERVATION_TOKENS)]


class Resolver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an endpoint is looked up. The answer replaces `{resolved}` in the target's `url`."""

    url: Text
    """The address of the resolver, with the same placeholders as the `url` of the target."""
    pointer: str = ""
    """The JSON pointer (RFC 6901) to the endpoint in the answer. Empty means the whole answer."""
    headers: dict[str, str] = {}
    """Headers of the request to the resolver."""
    timeout_seconds: Seconds = 10.0
    """How long the resolver may take to answer."""


class AnyTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every kind of target has.

    A task that names no target goes to that of its agent, or else to the default: the target marked
    so, or the only one. Without any target there is `echo`, which returns a task as its own result.
    A target named `pull` always exists.
    """

    slot: str | None = None
    """The slot whose provider key the target's tasks use. A rate limit of the provider pauses all
    targets of the slot."""
    provider: str | None = None
    """Instead of `slot`: each attempt gets the slot of this provider with the most quota left."""
    book_failures: bool | None = None
    """Whether Headgate books the estimate for a failed attempt that reports no usage. The default
    is yes, except for a 5xx of a model API."""
    trusts_cost: bool = False
    """Whether every token that may submit a task may state the task's cost (`costUsd`). With
    `false` only a token with `admin` may, and a cost from any other token counts as an estimate."""
    estimate_usd: Dollars | None = None
    """Dollars reserved for a task without an estimate, until the cost of its kind of work is known.
    """
    estimate_tokens: TokenCount | None = None
    """Tokens reserved for a task without an estimate, until the cost of its kind of work is known.
    """
    gateway: bool | None = None
    """Whether the target's tasks get an address and a token of the gateway. The default is yes for
    `command` and no for other kinds."""
    default: bool = False
    """Whether tasks that name no target go to this target. At most one target may be the default.
    """
    status: Standing = Standing.ACTIVE
    """A `paused` target starts nothing. A `draining` target finishes its tasks and accepts no new
    ones."""


class HttpTarget(AnyTarget, frozen=True, kw_only=True, tag_field="kind", tag="http"):
    """An HTTP endpoint."""

    url: Text = "{resolved}"
    """The address to which the task is sent. `{tabId}`, `{agentId}`, `{projectId}`, `{taskId}`,
    `{action}` and `{params.name}` are filled from the task, `{env.NAME}` from the environment,
    `{resolved}` by the resolver."""
    method: Literal["POST", "PUT", "PATCH"] = "POST"
    """The HTTP method."""
    headers: dict[str, str] = {}
    """Headers of each request; `{env.NAME}` is filled from the environment."""
    body: Literal["action", "input"] = "action"
    """Whether the endpoint gets the action with its parameters, or only the task's input."""
    resolver: Resolver | None = None
    """A request that looks up the endpoint before each attempt."""
    proxy: Text | None = None
    """The proxy for the requests of this target."""
    connect_timeout_seconds: Seconds = 10.0
    """How long it may take to open a connection."""
    max_connections: Count = 100
    """How many connections are open at once."""
    max_result_bytes: ResultBytes = MAX_RESULT_BYTES
    """The largest answer that is read."""


class CommandTarget(AnyTarget, frozen=True, kw_only=True, tag_field="kind", tag="command"):
    """A program that runs once for each task."""

    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """The program and its arguments. The task comes as JSON on standard input."""
    env: dict[str, str] = {}
    """Variables of the child; `{env.NAME}` is filled from the service's environment."""
    pass_env: tuple[str, ...] = ()
    """Names of variables that the child gets from the service's environment."""
    cwd: Text | None = None
    """The working directory of the command. With `run_as` the default is the home of that user."""
    run_as: Text | None = None
    """The user that runs the command, instead of the service's own user."""
    no_new_privileges: bool = True
    """Whether the command is kept from gaining privileges through programs such as `sudo`."""
    max_output_bytes: ResultBytes = MAX_OUTPUT_BYTES
    """How much of standard output, and of standard error, Headgate stores."""
    max_result_bytes: ResultBytes = MAX_RESULT_BYTES
    """The largest result that is stored. Headgate cuts the output until the result fits."""
    kill_grace_seconds: Annotated[float, msgspec.Meta(ge=0, le=3_600)] = 5.0
    """How long after SIGTERM Headgate kills the process."""


class CallableTarget(AnyTarget, frozen=True, kw_only=True, tag_field="kind", tag="callable"):
    """A Python function in the service's own process."""

    entry_point: Text
    """The function, as `package.module:function`."""
    threads: Count = 16
    """How many calls of a plain function run at once. A coroutine needs no thread."""
    max_result_bytes: ResultBytes = MAX_RESULT_BYTES
    """The largest result that is stored."""


class PullTarget(AnyTarget, frozen=True, kw_only=True, tag_field="kind", tag="pull"):
    """The workers of agents, on machines of their own, which ask for their tasks."""


class RayTarget(AnyTarget, frozen=True, kw_only=True, tag_field="kind", tag="ray"):
    """A Ray cluster, which runs a Python function or a command wherever it has room.

    `address` is what `ray.init` takes. `resources` are what one task needs: `num_cpus` (1 unless
    given), `num_gpus`, `memory`, and resources of the cluster's own by their names.
    """

    address: Text = "auto"
    """The address of the cluster, as `ray.init` takes it."""
    entry_point: Text | None = None
    """The function, as `package.module:function`. A target needs this or `command`."""
    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] | None = None
    """The program and its arguments. The task comes as JSON on standard input."""
    resources: dict[Text, Annotated[float, msgspec.Meta(ge=0)]] = {}
    """What one task needs: `num_cpus` (1 unless given), `num_gpus`, `memory`, and resources of the
    cluster's own."""
    runtime_env: dict[str, Any] = {}
    """The `runtime_env` of Ray: packages, working directory and variables of the task."""
    env: dict[str, str] = {}
    """Variables of the task; `{env.NAME}` is filled from the service's environment."""
    kill_grace_seconds: Annotated[float, msgspec.Meta(ge=0, le=3_600)] = 5.0
    """How long after the request to stop Ray ends the process."""
    max_result_bytes: ResultBytes = MAX_RESULT_BYTES
    """The largest result that is stored."""


class GatewayTarget(AnyTarget, frozen=True, kw_only=True, tag_field="kind", tag="gateway"):
    """The gateway of the service itself: each task is one call of a model.

    The action says what is asked, as `chat/completions`, and the input is the request. The gateway
    chooses the key, and books what the call has used.
    """

    max_connections: Count = 1_000
    """How many calls are made at once."""
    max_result_bytes: ResultBytes = MAX_RESULT_BYTES
    """The largest answer that is kept."""


Target = HttpTarget | CommandTarget | CallableTarget | PullTarget | RayTarget | GatewayTarget


def remote_targets(targets: Mapping[str, Target]) -> frozenset[str]:
    """Return the targets whose work goes on without the process that started it."""
    return frozenset(name for name, target in targets.items() if isinstance(target, RayTarget))


def has_slot(target: Target) -> bool:
    """Tell whether tasks of a target have a slot: the one that it names, or one of a provider."""
    return target.slot is not None or target.provider is not None


def uses_gateway(target: Target) -> bool:
    """Tell whether tasks of a target are handed an address and a token of the gateway."""
    is_usual = isinstance(target, CommandTarget | GatewayTarget)
    return is_usual if target.gateway is None else target.gateway


def gateway_targets(targets: Mapping[str, Target]) -> frozenset[str]:
    """Return the targets whose tasks are handed an address and a token of the gateway."""
    return frozenset(name for name, target in targets.items() if uses_gateway(target))


FREE_PROGRAMS = frozenset({"echo", "sleep", "true", "false"})
"""Programs that cost nothing by definition."""


def free_targets(targets: Mapping[str, Target]) -> frozenset[str]:
    """Return the targets whose work costs nothing by definition."""
    return frozenset(name for name, target in targets.items() if _is_free(target))


def _is_free(target: Target) -> bool:
    if isinstance(target, CommandTarget):
        return is_free_program(target.command[0])
    return isinstance(target, CallableTarget) and target.entry_point == ECHO.entry_point


def is_free_program(program: str) -> bool:
    """Tell whether a program costs nothing by definition: the system's own, not one beside us."""
    path = PurePosixPath(program)
    is_system = str(path.parent) in {".", "/bin", "/usr/bin"} and not program.startswith("./")
    return is_system and path.name in FREE_PROGRAMS


def target_estimates(targets: Mapping[str, Target]) -> dict[str, TargetEstimate]:
    """Return what one task costs at those targets whose operator says it."""
    return {
        name: TargetEstimate(
            micro_usd=None
            if target.estimate_usd is None
            else to_micro_usd(target.estimate_usd, field=f"targets.{name}.estimate_usd"),
            tokens=target.estimate_tokens,
        )
        for name, target in targets.items()
        if target.estimate_usd is not None or target.estimate_tokens is not None
    }


def free_failures(targets: Mapping[str, Target]) -> frozenset[str]:
    """Return the targets whose failures cost nothing unless they report figures."""
    return frozenset(name for name, target in targets.items() if target.book_failures is False)


PULL_NAME = "pull"
PULL = PullTarget()
GATEWAY_NAME = "gateway"
GATEWAY = GatewayTarget()

BUILT_IN_TARGETS: dict[str, Target] = {PULL_NAME: PULL, GATEWAY_NAME: GATEWAY}
"""The targets that are always there; one of these names is of the same kind in every file."""

ECHO = CallableTarget(entry_point="headgate.executors.callable:echo", default=True)
"""The target of a configuration that names none, so that a first task runs to its end."""
