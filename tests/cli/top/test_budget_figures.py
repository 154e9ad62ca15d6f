"""What budgets say in the terminal: one bar each, when they end, and money to the micro-dollar."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from headgate.api.schema.tasks import BudgetStatusBody
from headgate.cli.top.panes import BUDGETS
from headgate.cli.top.picture import Picture
from headgate.cli.top.rows import budget_rows, left_text, spent_text
from headgate.cli.top.tables import BAD, CAREFUL, Row, fitted, widths_of

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC).timestamp()


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(NOW + seconds, UTC)


def texts(row: Row) -> list[str]:
    return [cell.text for cell in row.cells]


def budget(**given: object) -> BudgetStatusBody:
    fields = {
        "scope": "", "window": "none", "spent_usd": "0", "reserved_usd": "0", "overrun_usd": "0",
        "spent_tokens": 0, "reserved_tokens": 0, "overrun_tokens": 0, **given,
    }  # fmt: skip
    status = BudgetStatusBody(**fields)  # type: ignore[arg-type]
    used_usd = (status.spent_usd, status.reserved_usd, status.overrun_usd)
    if status.limit_usd is not None:
        status.remaining_usd = str(Decimal(status.limit_usd) - sum(map(Decimal, used_usd)))
    used_tokens = status.spent_tokens + status.reserved_tokens + status.overrun_tokens
    if status.limit_tokens is not None:
        status.remaining_tokens = status.limit_tokens - used_tokens
    return status


def test_a_budget_has_one_bar_of_whatever_is_nearer_to_its_limit() -> None:
    child = budget(
        scope="session:a/run:1", window="rolling:24h", limit_usd="10", spent_usd="2",
        overrun_usd="1", reserved_usd="1", limit_tokens=1000, spent_tokens=100,
        resets_at=moment(90),
    )  # fmt: skip
    picture = Picture()
    picture.budgets = budget(children=[budget(scope="session:a", children=[child])])
    rows = budget_rows(picture, NOW)
    assert [texts(row)[0] for row in rows] == [
        "the whole service", "  session:a", "    run:1",
    ]  # fmt: skip
    assert texts(rows[0])[3] == "no limit"
    assert texts(rows[2])[2:] == [
        "$3.00", "$10.00, 1,000 tokens/24h", "-", "1 min 30 s", "100", "$1.00", "-",
    ]  # fmt: skip
    bar = rows[2].cells[1].bar
    assert bar is not None
    assert (round(bar.used, 3), round(bar.held, 3)) == (0.3, 0.1)


def test_eighty_columns_have_room_for_scopes_and_their_limits() -> None:
    picture = Picture()
    children = [
        budget(scope="session:spring-survey", limit_usd="180", window="rolling:1h"),
        budget(scope="project:evals", limit_tokens=5_500_000, window="rolling:1h",
               spent_usd="12.70", spent_tokens=240_000, resets_at=moment(3_599)),
        budget(scope="session:load-test", limit_usd="0.50", window="day@Europe/Berlin"),
    ]  # fmt: skip
    picture.budgets = budget(children=children)
    rows = budget_rows(picture, NOW)
    widths = widths_of(BUDGETS.columns, rows, 80)
    shown = [fitted(row.cells[3], BUDGETS.columns[3], widths[3]).strip() for row in rows]
    assert shown == ["no limit", "$180.00/1h", "5.5M tokens/1h", "$0.50/day"]
    names = [fitted(row.cells[0], BUDGETS.columns[0], widths[0]).rstrip() for row in rows]
    assert names[1] == "  session:spring-survey"


def test_a_limit_of_nothing_is_used_up() -> None:
    picture = Picture()
    picture.budgets = budget(limit_usd="0")
    (row,) = budget_rows(picture, NOW)
    assert row.cells[1].bar is not None
    assert (row.cells[1].bar.used, row.cells[1].style) == (1.0, BAD)


def one(**given: object) -> list[str]:
    """Return the row of one scope."""
    picture = Picture()
    picture.budgets = budget(**given)
    return texts(budget_rows(picture, NOW)[0])


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ({}, "-"),
        ({"limit_usd": "10"}, "-"),
        ({"limit_usd": "10", "spent_usd": "4", "exhausted_at": moment(720)}, "12 min"),
        ({"limit_usd": "10", "spent_usd": "4", "reserved_usd": "6"}, "now"),
        ({"limit_usd": "10", "spent_usd": "4", "overrun_usd": "6.5"}, "now"),
        ({"limit_tokens": 5, "spent_tokens": 5, "exhausted_at": moment(-1)}, "now"),
    ],
)
def test_a_budget_says_when_it_ends_if_anybody_knows(given: dict[str, object], ends: str) -> None:
    assert one(**given)[4] == ends


def test_a_budget_has_the_colour_of_the_share_that_is_told_elsewhere() -> None:
    # The two parts, each rounded, are a little less than the eight tenths that they are together.
    picture = Picture()
    picture.budgets = budget(limit_usd="10", spent_usd="1", reserved_usd="7")
    assert budget_rows(picture, NOW)[0].cells[1].style == CAREFUL


def test_what_was_spent_lately_is_told_for_an_hour_and_no_overrun_is_none() -> None:
    assert one(burn_usd_per_hour="12.345678", burn_measured_seconds=600)[7:] == ["-", "$12.35"]


def test_money_is_added_up_to_the_micro_dollar() -> None:
    # As floats, these would be a micro-dollar less.
    status = budget(spent_usd="4503599627.370497", overrun_usd="4503599627.370498")
    assert spent_text(status) == "$9,007,199,254.74"
    picture = Picture()
    picture.budgets = status
    assert budget_rows(picture, NOW)[0].cells[2].order == 9_007_199_254_740_995


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, ""),
        ({"remaining_usd": "140.12"}, "$140.12"),
        ({"remaining_usd": "-1.50", "remaining_tokens": 7}, "$0.00"),
        ({"remaining_tokens": 1_200_000}, "1.2M tokens"),
    ],
)
def test_what_is_left_is_never_less_than_nothing(given: dict[str, object], left: str) -> None:
    assert left_text(budget(**given)) == left
