"""The section `config` of a workflow file: budgets, defaults, endpoints, prices, and how to run."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from headgate.core.budgets.scopes import MAX_DEPTH, depth, parse_scope
from headgate.errors import InvalidScopeError
from headgate.providers.prices import MAX_MODEL_LENGTH, Price
from headgate.workflow.endpoints import read_endpoint_name, read_endpoints
from headgate.workflow.terms import (
    MAX_TOKENS,
    TERMS,
    Defaults,
    read_max_tokens,
    read_name,
    read_terms,
)
from headgate.workflow.uses import only_variables
from headgate.workflow.values import Value
from headgate.workflow.workflow import CONCURRENCY, BudgetScope, Endpoint

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
PRICE_KEYS = ("input_usd", "output_usd", "cache_read_usd", "cache_write_usd")
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
    for key in ("input_usd", "output_usd"):
        if key not in fields:
            value.refuse(f"has no {key}; write dollars for a million tokens")
    return Price(**{key: entry.dollars() for key, entry in fields.items()})
