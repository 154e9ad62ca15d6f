"""Errors pass between processes whole, and their line says what to do next."""

from __future__ import annotations

import copy
import pickle
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import headgate.providers.prices
import headgate.storage.transaction
import headgate.testing.simulation
from headgate.budgets.connect import connect_budget
from headgate.errors import (
    BudgetExceededError,
    HeadgateError,
    InvalidFieldError,
    WaitTimeoutError,
    to_tenant,
    without_figures,
)

LOADED = (headgate.storage.transaction, headgate.providers.prices, headgate.testing.simulation)


def tree_of(kind: type[HeadgateError]) -> list[type[HeadgateError]]:
    return [kind, *(inner for child in kind.__subclasses__() for inner in tree_of(child))]


def exceeded(
    *,
    requested: int = 1,
    resets_at: float | None = None,
    may_clear: bool = False,
    is_overfull: bool = False,
) -> BudgetExceededError:
    return BudgetExceededError(
        scope="session:s",
        unit="micro_usd",
        limit=1_000_000,
        spent=999_999,
        reserved=1,
        overrun=0,
        requested=requested,
        resets_at=resets_at,
        may_clear=may_clear,
        is_overfull=is_overfull,
    )


def is_same(copied: HeadgateError, error: HeadgateError) -> bool:
    parts = (type(error), str(error), error.args, vars(error))
    return (type(copied), str(copied), copied.args, vars(copied)) == parts


@pytest.mark.parametrize("kind", tree_of(HeadgateError), ids=lambda kind: kind.__name__)
def test_every_error_is_pickled_and_copied_with_its_fields(kind: type[HeadgateError]) -> None:
    error = kind.__new__(kind)
    error.args = ("a line",)
    vars(error).update(field="url", problem="is wrong", limit=3)
    error.add_note("a note")
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert is_same(copied, error)
        assert copied.args == ("a line",)


@pytest.mark.parametrize(
    "error",
    [
        exceeded(),
        InvalidFieldError("url", "is wrong"),
        WaitTimeoutError("task t is still queued", code="wait_timeout", task_id="t"),
    ],
)
def test_an_error_that_was_raised_is_pickled_whole(error: HeadgateError) -> None:
    assert is_same(pickle.loads(pickle.dumps(error)), error)


def test_a_worker_of_a_pool_may_raise_an_error_with_fields() -> None:
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(InvalidFieldError) as caught,
    ):
        pool.submit(connect_budget, "nothing:").result(timeout=60)
    assert caught.value.field == "url"


ADVICE = [
    (None, False, "waiting does not help, raise the limit or lower max_tokens or the estimate"),
    (None, True, "reservations in flight may free room, try again later or raise the limit"),
    (1_775_995_200.0, True, "room is freed at 2026-04-12 12:00:00 UTC, wait for it or raise the"),
    (1e18, True, "room is freed at a time in the far future"),
    (1_775_995_200.0, False, "waiting does not help"),
]


@pytest.mark.parametrize(("resets_at", "may_clear", "advice"), ADVICE)
def test_a_refusal_ends_with_what_to_do(
    resets_at: float | None, *, may_clear: bool, advice: str
) -> None:
    line = str(exceeded(resets_at=resets_at, may_clear=may_clear))
    beginning = "Budget exceeded: spent $0.999999 of $1.0000 limit; $0.000001 needed, $0.00 left"
    details = "(scope session:s, $0.000001 reserved)"
    assert line.startswith(f"{beginning} {details}; {advice}")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("requested", "text"), [(60_000_000, "$60.00"), (1_234_500, "$1.2345"), (10, "$0.00001")]
)
def test_a_refusal_names_amounts_exactly(requested: int, text: str) -> None:
    assert f" {text} needed, " in str(exceeded(requested=requested))


def exceeded_in(scope: str, unit: str = "micro_usd") -> BudgetExceededError:
    return BudgetExceededError(
        scope=scope,
        unit=unit,
        limit=5_550_000,
        spent=4_440_000,
        reserved=3_330_000,
        overrun=2_220_000,
        requested=1_110_000,
        resets_at=1_800_000_000.0,
        may_clear=True,
    )


@pytest.mark.parametrize("unit", ["micro_usd", "tokens"])
@pytest.mark.parametrize("scope", ["", "project:x/agent:a"])
def test_the_figures_of_a_budget_are_left_out_for_those_who_may_not_read_it(
    scope: str, unit: str
) -> None:
    error = exceeded_in(scope, unit)
    for line in (str(error), error.of_call()):
        assert without_figures(line, lambda name: name == scope) == to_tenant(line)
        outline = without_figures(line, lambda _: False)
        assert outline == to_tenant(error.outline)
        assert (scope or "root") in outline
        assert "2027-01-15" in outline
        assert not re.search(r"([1-5])\1", outline.replace("2027", ""))


# What a call may wait at most, and how the refusal of a budget that resets later says so.
MOST_WAITS = [
    (None, "room is freed at 2027-01-15 08:00:00 UTC, wait for it or raise the limit"),
    (
        21_600.000_000_2,
        (
            "it resets at 2027-01-15 08:00:00 UTC, and a call waits at most 6 h "
            "(gateway.max_wait_seconds = 21600), so wait for the reset or raise the limit"
        ),
    ),
]


@pytest.mark.parametrize(("most", "advice"), MOST_WAITS)
def test_the_refusal_of_a_call_says_what_is_left(most: float | None, advice: str) -> None:
    line = BudgetExceededError(
        scope="project:a",
        unit="micro_usd",
        limit=250_000,
        spent=200_000,
        reserved=0,
        overrun=10_000,
        requested=70_000,
        resets_at=1_800_000_000.0,
        may_clear=True,
    ).of_call(most_wait_seconds=most)
    assert line == (
        "Budget exceeded: spent $0.2100 of $0.2500 limit; $0.07 needed, $0.04 left "
        f"(scope project:a, $0.00 reserved); {advice}"
    )


def test_a_tenant_is_not_told_to_raise_a_limit_that_it_cannot_raise() -> None:
    for resets_at, may_clear in ((None, False), (None, True), (1_800_000_000.0, True)):
        line = to_tenant(str(exceeded(resets_at=resets_at, may_clear=may_clear)))
        assert "raise the limit" not in line
        assert "ask an operator for a higher limit" in line


def test_without_figures_a_full_ledger_says_what_to_do_as_well() -> None:
    error = exceeded(is_overfull=True)
    assert without_figures(str(error), lambda _: False) == error.outline
    assert error.outline.endswith("settle or release what is reserved, then try again")


def test_any_other_error_stays_as_it_is() -> None:
    for line in ("it broke", "Budget exceeded: spent all", "x" * 5_000):
        assert without_figures(line, lambda _: False) == line
