"""Caches: each is listed here with what bounds its keys, and long texts of clients enter none."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import headgate
from headgate.api import submission
from headgate.budgets import redis_script
from headgate.core import dispatch_state, money
from headgate.core.budgets.reservations import Charge
from headgate.core.budgets.scopes import Scope
from headgate.errors import HeadgateError
from headgate.providers import prices
from headgate.storage import ledger

CACHES = {
    "api.shares.address_key": "addresses of connections",
    "api.submission._almost": "an excerpt of 61 characters, and the names of fields",
    "api.submission._small": "types",
    "api.submission._remembered_scopes": "1,024 characters",
    "budgets.redis_script._remembered": "1,024 characters",
    "config.messages._docs_of_module": "modules",
    "config.messages.key_path": "keys of settings",
    "core.budgets.windows._day_start": "a day and a zone",
    "core.dispatch_state._remembered_charged": "1,024 characters",
    "core.gates._name_of": "a project, a target and a scope, of at most 128 and 512 characters",
    "core.gates.offered_parts": "as those of gate_parts",
    "core.gates.gate_parts": "a project, a target, a slot and scopes, of at most 512 characters",
    "core.money._read_decimal": "100 characters",
    "core.slots.wakes.day_occurrences": "settings",
    "providers.connection_pool._request_line": "a path of at most 256 characters",
    "providers.http_client._split_url": "a URL of at most 256 characters",
    "providers.connection_pool._line_start": "names of headers, of which a list passes",
    "engine.webhooks._site": "the host of an address of at most 2,048 characters",
    "providers.call_estimates._known_kind": "a project, and a model of at most 200 characters",
    "providers.prices._found_in_list": "200 characters",
    "providers.prices._nearest": "200 characters",
    "providers.requests._endpoint_of": "the last 100 characters of a path",
    "redaction.written_forms": "keys of slots, secrets of settings",
    "storage.ledger._placed_sql": "dialects and statements",
    "storage.ledger._purge_sql": "dialects and tables",
    "storage.ledger._remembered": "1,024 characters",
    "storage.ledger.to_limit": "numbers, and a window that was read: some 60 characters",
    "storage.queries._by_id_sql": "dialects and tables",
    "storage.slot_rows._decoder": "types",
    "storage.tokens._scope_or_none": "a project and an agent, of at most 128 characters each",
    "storage.transaction.percent_placeholders": "statements",
    "storage.zones.zone": "names of zones that the machine knows",
    "workflow.local_backend._find": "names of programs, in a process of the user's own",
    "workflow.report._by_state": "counts",
}


NEED_RAY = frozenset(("headgate.executors.ray_cluster", "headgate.inprocess.ray"))
NO_TEXTS = frozenset(("int", "bool", "Dialect"))


def caches() -> Iterator[str]:
    """Give the caches whose keys may hold a text."""
    for module in pkgutil.walk_packages(headgate.__path__, "headgate."):
        if module.name.endswith("__main__") or module.name in NEED_RAY:
            continue
        found = importlib.import_module(module.name)
        owners = [found, *[one for _, one in inspect.getmembers(found, inspect.isclass)]]
        for owner in owners:
            for name, value in vars(owner).items():
                if not hasattr(value, "cache_info") or value.__module__ != module.name:
                    continue
                kinds = value.__wrapped__.__annotations__.copy()
                kinds.pop("return", None)
                if not NO_TEXTS.issuperset(kinds.values()):
                    yield f"{module.name.removeprefix('headgate.')}.{name}"


def test_every_cache_of_texts_is_listed_with_what_bounds_its_keys() -> None:
    assert set(caches()) == set(CACHES)


LONG_SCOPE = Scope("/".join(f"session:{'x' * 100}" for _ in range(4)))
LONG_SCOPES = tuple(Scope(f"{LONG_SCOPE}{number}") for number in range(10))
CHARGES = ledger.charges_text(tuple(Charge(scope=one, bucket_start=1) for one in LONG_SCOPES))

LONG_TEXTS: list[tuple[str, Any, Callable[[], object]]] = [
    ("amount", money._read_decimal, lambda: money.to_micro_usd("0" * 500_000 + "1")),
    ("amount shown", money._read_decimal, lambda: money.read_usd("0" * 500_000 + "1")),
    ("model", prices._found_in_list, lambda: prices.PriceList().is_known("x" * 500_000)),
    (
        "scopes of a submit",
        submission._remembered_scopes,
        lambda: submission.parse_scopes(list(LONG_SCOPES), Scope("project:a")),
    ),
    (
        "field",
        submission._almost,
        lambda: submission.check_unknown(["x" * 500_000], submission.TASK_FIELDS),
    ),
    (
        "scopes of a task",
        dispatch_state._remembered_charged,
        lambda: dispatch_state.charged_by(LONG_SCOPES),
    ),
    ("charges", ledger._remembered, lambda: ledger._charges(CHARGES)),
    (
        "charges in Redis",
        redis_script._remembered,
        lambda: redis_script._charges_from("\n".join(f"{one} 1" for one in LONG_SCOPES)),
    ),
]


@pytest.mark.parametrize(
    ("cache", "call"), [row[1:] for row in LONG_TEXTS], ids=[row[0] for row in LONG_TEXTS]
)
def test_a_long_text_of_a_client_enters_no_cache(cache: Any, call: Callable[[], object]) -> None:
    cache.cache_clear()
    with suppress(HeadgateError):
        call()
    assert cache.cache_info().currsize == (1 if cache is submission._almost else 0)
