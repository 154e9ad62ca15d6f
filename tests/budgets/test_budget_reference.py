"""The page of budgets has every field and every URL, and the reference has every method."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headgate.budgets.connect import KNOWN_URLS
from headgate.budgets.tracker import (
    ActiveReservation,
    BudgetTracker,
    LedgerTracker,
    ReservationToken,
)
from headgate.errors import BudgetExceededError
from headgate.metrics import METRICS, BudgetMetrics
from headgate.providers.prices import PriceList
from reference_pages import part

PAGE = (Path(__file__).parents[2] / "docs/reference/budget-tracker.md").read_text()


def methods_of(kind: type) -> Iterator[tuple[str, inspect.Signature]]:
    for name, value in vars(kind).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            yield name, inspect.signature(value)


@pytest.mark.parametrize("kind", [ReservationToken])
def test_every_field_is_there(kind: type[msgspec.Struct]) -> None:
    assert [name for name in kind.__struct_fields__ if f"`{name}`" not in PAGE] == []


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


def test_what_counts_metrics_is_there() -> None:
    methods = {name for name, _ in methods_of(BudgetMetrics)}
    assert {name for name in ("observe", "refresh") if f"{name}(tracker)" in PAGE} <= methods
    assert [name for name in METRICS if name.startswith("headgate_budget_")]


def test_every_method_is_in_the_reference_of_python() -> None:
    page = part("python")
    kinds = (BudgetTracker, LedgerTracker, ActiveReservation, PriceList)
    methods = [name for kind in kinds for name, _ in methods_of(kind)]
    assert [name for name in methods if f"| `{name}(" not in page] == []
