"""The reference of budgets is complete: every method, field and metric is in it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headgate.budgets.connect import KNOWN_URLS, connect_budget
from headgate.budgets.tracker import (
    ActiveReservation,
    BudgetTracker,
    LedgerTracker,
    ReservationToken,
    reserved,
)
from headgate.errors import BudgetExceededError
from headgate.metrics import BudgetMetrics
from headgate.providers.prices import Cost, Price, PriceList

PAGE = (Path(__file__).parents[2] / "docs/reference/budget-tracker.md").read_text()


def methods_of(kind: type) -> Iterator[tuple[str, inspect.Signature]]:
    for name, value in vars(kind).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            yield name, inspect.signature(value)


def written(signature: inspect.Signature, *, skipped: int) -> str:
    """Return a signature as the page writes it: without annotations, 60 for 60.0."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in list(signature.parameters.values())[skipped:]
    ]
    text = str(inspect.Signature(parameters)).replace("'", '"')
    return text.replace("=60.0", "=60")


METHODS = [
    *((name, written(signature, skipped=1)) for name, signature in methods_of(BudgetTracker)),
    ("create_budget", written(inspect.signature(LedgerTracker.create_budget), skipped=1)),
    ("reserved", written(inspect.signature(reserved), skipped=1)),
    ("connect_budget", written(inspect.signature(connect_budget), skipped=0)),
    ("PriceList", written(inspect.signature(PriceList), skipped=0)),
    *(
        (f"PriceList.{name}", written(signature, skipped=1))
        for name, signature in methods_of(PriceList)
    ),
    ("held.charge", "(actual_usd, tokens=None)"),
    ("held.not_charged", "()"),
]


@pytest.mark.parametrize(("name", "signature"), METHODS, ids=[name for name, _ in METHODS])
def test_every_method_is_there_with_its_signature(name: str, signature: str) -> None:
    assert f"`{name}{signature}`" in PAGE


@pytest.mark.parametrize("kind", [ReservationToken, Cost])
def test_every_field_is_there(kind: type[msgspec.Struct]) -> None:
    assert [name for name in kind.__struct_fields__ if f"`{name}`" not in PAGE] == []


def test_every_field_of_a_price_is_there() -> None:
    assert all(name in PAGE for name in Price.__struct_fields__)


def test_every_field_of_the_refusal_is_there() -> None:
    fields = inspect.signature(BudgetExceededError).parameters
    assert [name for name in fields if f"`{name}`" not in PAGE] == []


def test_what_a_body_may_ask_of_its_hold_is_there() -> None:
    public = [name for name, _ in methods_of(ActiveReservation)]
    assert [name for name in public if f"`held.{name}(" not in PAGE] == []
    assert "`held.renewal_error`" in PAGE
    assert "`held.reservation_id`" in PAGE


def test_every_kind_of_url_is_there() -> None:
    assert [url for url in KNOWN_URLS if url.partition(":")[0] not in PAGE] == []


def test_every_metric_is_there() -> None:
    methods = [name for name, _ in methods_of(BudgetMetrics)]
    assert {"observe", "refresh"} <= set(methods)
    gauges = ("limit_usd", "remaining_usd", "spent_usd", "reserved_usd", "overrun_usd")
    for metric in (*gauges, "rejections_total"):
        assert f"`headgate_budget_{metric}`" in PAGE
