"""Targets as the configuration writes them: where tasks are executed, and within which bounds.

`book_failures` says whether a failure that reports no figures books the estimate of its task; left
out, it does, except for the 5xx of a model API. With `trusts_cost` anybody who submits a task may
state what it costs; otherwise only an operator may, and from anybody else it is an estimate.

A target is a table with a `kind`. These types only say what may be written; what a target means is
checked when its executor is built, which needs no network and runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Literal

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
    """Where an endpoint is looked up: `pointer` (RFC 6901) finds it in the JSON at `url`.

    What is found replaces `{resolved}` in the target's own URL.
    """

    url: Text
    pointer: str = ""
    headers: dict[str, str] = {}
    timeout_seconds: Seconds = 10.0


class HttpTarget(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="http",
):
    """An HTTP endpoint; `body` says whether it gets the action or just the task's input."""

    url: Text = "{resolved}"
    method: Literal["POST", "PUT", "PATCH"] = "POST"
    headers: dict[str, str] = {}
    body: Literal["action", "input"] = "action"
    resolver: Resolver | None = None
    proxy: Text | None = None
    connect_timeout_seconds: Seconds = 10.0
    max_connections: Count = 100
    max_result_bytes: ResultBytes = MAX_RESULT_BYTES
    slot: str | None = None
    provider: str | None = None
    book_failures: bool | None = None
    trusts_cost: bool = False
    estimate_usd: Dollars | None = None
    estimate_tokens: TokenCount | None = None
    default: bool = False
    status: Standing = Standing.ACTIVE


class CommandTarget(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="command",
):
    """A program and its arguments; `pass_env` names variables that it gets from the service's.

    `run_as` is the user that it runs as, unless it is the service's own; without
    `no_new_privileges` it may gain some by programs such as sudo.
    """

    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    env: dict[str, str] = {}
    pass_env: tuple[str, ...] = ()
    cwd: Text | None = None
    run_as: Text | None = None
    no_new_privileges: bool = True
    max_output_bytes: ResultBytes = MAX_OUTPUT_BYTES
    kill_grace_seconds: Annotated[float, msgspec.Meta(ge=0, le=3_600)] = 5.0
    slot: str | None = None
    provider: str | None = None
    book_failures: bool | None = None
    trusts_cost: bool = False
    estimate_usd: Dollars | None = None
    estimate_tokens: TokenCount | None = None
    default: bool = False
    status: Standing = Standing.ACTIVE


class CallableTarget(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="callable",
):
    """A Python function as `package.module:function`; plain ones run on at most `threads`."""

    entry_point: Text
    threads: Count = 16
    max_result_bytes: ResultBytes = MAX_RESULT_BYTES
    slot: str | None = None
    provider: str | None = None
    book_failures: bool | None = None
    trusts_cost: bool = False
    estimate_usd: Dollars | None = None
    estimate_tokens: TokenCount | None = None
    default: bool = False
    status: Standing = Standing.ACTIVE


class PullTarget(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="pull",
):
    """The workers of agents, on machines of their own, which ask for their tasks."""

    slot: str | None = None
    provider: str | None = None
    book_failures: bool | None = None
    trusts_cost: bool = False
    estimate_usd: Dollars | None = None
    estimate_tokens: TokenCount | None = None
    default: bool = False
    status: Standing = Standing.ACTIVE


Target = HttpTarget | CommandTarget | CallableTarget | PullTarget


def has_slot(target: Target) -> bool:
    """Tell whether tasks of a target have a slot: the one that it names, or one of a provider."""
    return target.slot is not None or target.provider is not None


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
"""The target of this name is always there."""

ECHO = CallableTarget(entry_point="headgate.executors.callable:echo", default=True)
"""The target of a configuration that names none, so that a first task runs to its end."""
