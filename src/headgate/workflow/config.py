"""The section `config` of a workflow file: budgets, defaults, endpoints, prices, and how to run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from headgate.core.budgets.scopes import MAX_DEPTH, depth, parse_scope
from headgate.core.money import MAX_RESERVATION_TOKENS
from headgate.core.snapshot import MAX_PRIORITY, MAX_WEIGHT
from headgate.core.task import MAX_ATTEMPT_SECONDS, MAX_ATTEMPTS, OnParentFailure
from headgate.errors import InvalidScopeError, Problems, WorkflowError
from headgate.providers.prices import MAX_MODEL_LENGTH, Price
from headgate.workflow.placeholders import EnvPlaceholder, Text
from headgate.workflow.workflow import CONCURRENCY, BudgetScope, Endpoint, Estimate
from headgate.workflow.yaml_document import (
    Value,
    only_variables,
    read_headers,
    read_url,
)

# The terms of a step, such as priority and timeout, and the defaults, which have them, too.
#
# Rule: a key means and allows the same in both places, because one table reads it.

ESTIMATE_KEYS = ("usd", "tokens")
MIN_TIMEOUT_SECONDS = 0.1
MAX_NAME_LENGTH = 128
MAX_TOKENS = 1_024
LARGEST_MAX_TOKENS = 10_000_000

_TERM_NAME = re.compile(r"[^\s\x00-\x1f\x7f](?:[^\x00-\x1f\x7f]*[^\s\x00-\x1f\x7f])?")


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What steps have that do not say it themselves; `terms` are fields of a step."""

    terms: dict[str, Any] = {}
    endpoint: str | None = None
    model: Value | None = None
    max_tokens: int = MAX_TOKENS
    target: str | None = None


def read_max_tokens(value: Value) -> int:
    """Read how long an answer may be."""
    return value.whole(1, LARGEST_MAX_TOKENS)


def read_name(value: Value) -> str:
    """Read the name of an agent, a target, a model or the like."""
    name = value.name(_TERM_NAME, "write one without spaces at its ends", most=MAX_NAME_LENGTH)
    if not name.isprintable():
        value.refuse("must be printable; leave out what cannot be seen")
    return name


def read_estimate(value: Value) -> Estimate:
    """Read what a step is expected to cost at most."""
    fields = value.fields(ESTIMATE_KEYS, "an estimate")
    if not fields:
        value.refuse("says nothing; write usd, tokens or both")
    usd, tokens = fields.get("usd"), fields.get("tokens")
    return Estimate(
        micro_usd=None if usd is None else usd.amount(),
        tokens=None if tokens is None else tokens.whole(0, MAX_RESERVATION_TOKENS),
    )


def _weight(value: Value) -> float:
    return value.number(0, MAX_WEIGHT)


def _on_parent_failure(value: Value) -> OnParentFailure:
    return OnParentFailure(value.choice(tuple(one.value for one in OnParentFailure)))


TERMS: dict[str, tuple[str, Callable[[Value], Any]]] = {
    "priority": ("priority", lambda value: value.whole(-MAX_PRIORITY, MAX_PRIORITY)),
    "weight": ("weight", _weight),
    "agent": ("agent", read_name),
    "retries": ("retries", lambda value: value.whole(0, MAX_ATTEMPTS - 1)),
    "timeout": (
        "timeout_seconds",
        lambda value: value.seconds(MIN_TIMEOUT_SECONDS, MAX_ATTEMPT_SECONDS),
    ),
    "estimate": ("estimate", read_estimate),
    "on_parent_failure": ("on_parent_failure", _on_parent_failure),
}
"""By its key, the field of a step that a term is, and what reads it."""


def read_terms(fields: Mapping[str, Value]) -> dict[str, Any]:
    """Read those terms that are there, as fields of a step."""
    errors, found = Problems(WorkflowError), dict[str, Any]()
    for key, (field, read) in TERMS.items():
        if key in fields:
            with errors.collected():
                found[field] = read(fields[key])
    errors.check()
    return found


# Endpoints: where models are asked, those of the file and those that are always there.
#
# `openai` and `anthropic` read the variables that the SDKs of the two providers read. Rule: the
# kind of an endpoint decides the path and the form of a request, never the name of a model.

Kind = Literal["openai", "anthropic"]

ENDPOINT_KEYS = ("kind", "url", "key", "headers")
PATHS: dict[Kind, str] = {"openai": "/chat/completions", "anthropic": "/v1/messages"}
"""What follows the URL of an endpoint of a kind."""


def _built_in(kind: Kind, *, prefix: str, url: str) -> Endpoint:
    address = EnvPlaceholder(name=f"{prefix}_BASE_URL", default=url)
    key = Text(parts=(EnvPlaceholder(name=f"{prefix}_API_KEY"),))
    return Endpoint(name=kind, kind=kind, url=Text(parts=(address,), is_url=True), key=key)


BUILT_IN = {
    "openai": _built_in("openai", prefix="OPENAI", url="https://api.openai.com/v1"),
    "anthropic": _built_in("anthropic", prefix="ANTHROPIC", url="https://api.anthropic.com"),
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def read_endpoints(value: Value | None) -> dict[str, Endpoint]:
    """Read the endpoints of a file, beside those that are always there."""
    endpoints = dict(BUILT_IN)
    for name, entry in ({} if value is None else value.entries("endpoints")).items():
        if len(name) > MAX_NAME_LENGTH or _NAME.fullmatch(name) is None:
            entry.refuse("is no name of an endpoint; write letters, digits and . _ -")
        endpoints[name] = _endpoint(name, entry)
    return endpoints


def read_endpoint_name(value: Value, endpoints: Mapping[str, Endpoint]) -> str:
    """Read the name of an endpoint, which must be there."""
    return value.choice(tuple(endpoints))


def _endpoint(name: str, value: Value) -> Endpoint:
    fields = value.fields(ENDPOINT_KEYS, "an endpoint")
    for key in ("kind", "url"):
        if key not in fields and name not in BUILT_IN:
            value.refuse(f"has no {key}; write it")
    read = {key: _READERS[key](entry) for key, entry in fields.items()}
    if name in BUILT_IN:
        return msgspec.structs.replace(BUILT_IN[name], line=value.line, **read)
    return Endpoint(name=name, line=value.line, **read)


_READERS: dict[str, Callable[[Value], Any]] = {
    "kind": lambda value: value.choice(tuple(PATHS)),
    "url": lambda value: read_url(value, only_variables),
    "key": only_variables,
    "headers": lambda value: read_headers(value, only_variables),
}


CONFIG_KEYS = (
    "budget_usd",
    "budget_scopes",
    "defaults",
    "endpoints",
    "prices",
    "concurrency",
    "fail_fast",
    "on_exhausted",
)
SCOPE_KEYS = ("name", "key", "budget_usd")
DEFAULT_KEYS = (*TERMS, "endpoint", "model", "max_tokens", "target")
PRICE_KEYS = ("input", "output", "cached_input", "cache_write")
MAX_CONCURRENCY = 10_000
WORKFLOW = "workflow"
"""The kind of the innermost scope, which every workflow has."""

_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_MAX_KIND_LENGTH = 64


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a file but its steps."""

    micro_usd: int | None = None
    scopes: tuple[BudgetScope, ...] = ()
    defaults: Defaults = Defaults()
    endpoints: dict[str, Endpoint] = {}
    prices: dict[str, Price] = {}
    concurrency: int = CONCURRENCY
    fail_fast: bool = False
    on_exhausted: Literal["stop", "wait"] = "stop"


def read_config(value: Value | None) -> Config:
    """Read the section; without one everything has its default."""
    fields = {} if value is None else value.fields(CONFIG_KEYS, "config")
    endpoints = read_endpoints(fields.get("endpoints"))
    config = Config(
        scopes=_scopes(fields["budget_scopes"]) if "budget_scopes" in fields else (),
        defaults=_defaults(fields["defaults"], endpoints) if "defaults" in fields else Defaults(),
        endpoints=endpoints,
        prices=_prices(fields["prices"]) if "prices" in fields else {},
    )
    read = {name: reader(fields[key]) for key, (name, reader) in _PLAIN.items() if key in fields}
    return msgspec.structs.replace(config, **read)


_PLAIN: dict[str, tuple[str, Any]] = {
    "budget_usd": ("micro_usd", Value.limit),
    "concurrency": ("concurrency", lambda value: value.whole(1, MAX_CONCURRENCY)),
    "fail_fast": ("fail_fast", Value.flag),
    "on_exhausted": ("on_exhausted", lambda value: value.choice(("stop", "wait"))),
}


def _scopes(value: Value) -> tuple[BudgetScope, ...]:
    scopes: dict[str, BudgetScope] = {}
    for entry in value.items("budgets"):
        scope = _scope(entry)
        if scope.name in scopes:
            entry.refuse(f"there is a scope {scope.name!r} already; keep one of them")
        scopes[scope.name] = scope
    if len(scopes) >= MAX_DEPTH:
        value.refuse(f"has {len(scopes)} scopes, at most {MAX_DEPTH - 1} nest; leave some out")
    return tuple(scopes.values())


def _scope(value: Value) -> BudgetScope:
    fields = value.fields(SCOPE_KEYS, "a budget scope")
    for needed in ("name", "key"):
        if needed not in fields:
            value.refuse(f"has no {needed}; write it")
    advice = "write letters, digits, _ and -"
    # Scopes have their kind in lower case, so that no budget has two spellings.
    name = fields["name"].name(_KIND, advice, most=_MAX_KIND_LENGTH).lower()
    if name == WORKFLOW:
        fields["name"].refuse("is the workflow's own scope; its limit is config.budget_usd")
    key = only_variables(fields["key"])
    if all(isinstance(part, str) for part in key.parts):
        _check_key(fields["key"], name, "".join(map(str, key.parts)))
    limit = fields["budget_usd"].limit() if "budget_usd" in fields else None
    return BudgetScope(name=name, key=key, micro_usd=limit, line=fields["key"].line)


def _check_key(value: Value, name: str, key: str) -> None:
    try:
        is_one_part = depth(parse_scope(f"{name}:{key}")) == 1
    except InvalidScopeError:
        is_one_part = False
    if not is_one_part:
        value.refuse("is no name of a scope; write letters, digits and . _ @ + -, and not too many")


def _defaults(value: Value, endpoints: dict[str, Endpoint]) -> Defaults:
    fields = value.fields(DEFAULT_KEYS, "config.defaults")
    most = fields.get("max_tokens")
    return Defaults(
        terms=read_terms(fields),
        endpoint=read_endpoint_name(fields["endpoint"], endpoints)
        if "endpoint" in fields
        else None,
        model=fields.get("model"),
        max_tokens=MAX_TOKENS if most is None else read_max_tokens(most),
        target=read_name(fields["target"]) if "target" in fields else None,
    )


def _prices(value: Value) -> dict[str, Price]:
    return {model: _price(model, entry) for model, entry in value.entries("prices").items()}


def _price(model: str, value: Value) -> Price:
    if not model or len(model) > MAX_MODEL_LENGTH:
        value.refuse(f"is no model; a name has 1 to {MAX_MODEL_LENGTH} characters")
    fields = value.fields(PRICE_KEYS, "a price")
    for key in ("input", "output"):
        if key not in fields:
            value.refuse(f"has no {key}; write dollars for a million tokens")
    return Price(**{key: entry.dollars() for key, entry in fields.items()})
