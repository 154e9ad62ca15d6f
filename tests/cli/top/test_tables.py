"""Bars and tables fit the room that there is, whatever others wrote into them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from headgate.cli.top.app import bounded
from headgate.cli.top.panes import PANES, PaneKind
from headgate.cli.top.tables import (
    ELLIPSIS,
    GAP,
    Bar,
    Cell,
    Column,
    ColumnKind,
    Row,
    RowFilter,
    arranged,
    bar_cell,
    drawn,
    fitted,
    number_cell,
    text_cell,
    widths_of,
)

PLAIN = Column(title="name", least=4)
FIGURE = Column(title="n", least=2, holds=ColumnKind.FIGURE)
CUT = Column(title="task", least=5, holds=ColumnKind.ID)
NAME = Column(title="agent", least=6, holds=ColumnKind.NAME)


@pytest.mark.parametrize(
    ("bar", "shown"),
    [
        (Bar(used=0.0), "··········"),
        (Bar(used=0.001), "█·········"),
        (Bar(used=0.5), "█████·····"),
        (Bar(used=0.999), "█████████·"),
        (Bar(used=1.0), "██████████"),
        (Bar(used=7.0), "██████████"),
        (Bar(used=0.3, held=0.2), "███▒▒·····"),
        (Bar(used=0.3, held=0.7), "███▒▒▒▒▒▒▒"),
        (Bar(used=0.2, mark=0.5), "██··│·····"),
        (Bar(used=1.0, mark=1.0), "█████████│"),
        (Bar(used=0.0, mark=0.0), "│·········"),
    ],
)
def test_a_bar_shows_what_is_not_nothing_and_is_full_when_it_is(bar: Bar, shown: str) -> None:
    assert drawn(bar, 10) == shown


@given(st.floats(0, 2), st.floats(0, 2), st.none() | st.floats(0, 1), st.integers(0, 40))
def test_a_bar_is_as_wide_as_its_column(
    used: float, held: float, mark: float | None, width: int
) -> None:
    assert len(drawn(Bar(used=used, held=held, mark=mark), width)) == width


@given(st.text(max_size=400), st.integers(0, 60), st.sampled_from([PLAIN, CUT]))
def test_a_text_of_anybody_fills_its_column_and_nothing_else(
    text: str, width: int, column: Column
) -> None:
    shown = fitted(text_cell(text), column, width)
    assert shown.isprintable()
    assert cell_len(shown) == width


def test_marks_that_turn_a_line_or_move_a_cursor_are_written_out() -> None:
    assert text_cell("a\x1b[2Jb\u202ec\nd").text == "a\\x1b[2Jb\\u202ec\\nd"


def test_marks_whose_width_terminals_do_not_agree_upon_are_written_out() -> None:
    assert text_cell("❤\ufe0f 👍\U0001f3fd").text == "❤\\ufe0f 👍\\U0001f3fd"
    assert bounded(["🏳\ufe0f"]) == "🏳\\ufe0f"


def test_figures_stand_at_the_right_and_a_name_that_is_cut_keeps_its_end() -> None:
    assert fitted(number_cell("12", 12), FIGURE, 5) == "   12"
    assert fitted(text_cell("tsk_01m7ggphz"), CUT, 6) == "…ggphz"
    assert fitted(text_cell("researcher-3"), NAME, 6) == "…her-3"
    assert fitted(text_cell("a long name"), PLAIN, 6) == "a lon…"
    assert fitted(text_cell("日本語"), PLAIN, 5) == "日本…"


def test_figures_have_their_room_before_texts_and_those_before_names_and_bars() -> None:
    columns = (CUT, PLAIN, Column(title="bar", least=4, holds=ColumnKind.BAR), FIGURE)
    cells = (
        text_cell("t" * 30),
        text_cell("n" * 12),
        bar_cell(Bar(used=1)),
        number_cell("1234", 1),
    )
    rows = [Row(key="a", cells=cells)]
    gaps = len(GAP) * 3
    assert widths_of(columns, rows, 17 + gaps) == [5, 4, 4, 4]
    assert widths_of(columns, rows, 25 + gaps) == [5, 12, 4, 4]
    assert widths_of(columns, rows, 50 + gaps) == [30, 12, 4, 4]
    assert widths_of(columns, rows, 70 + gaps) == [30, 12, 24, 4]


@pytest.mark.parametrize("width", [1, 2, 3, 10, 20, 40, 41, 42, 60, 70, 79])
@pytest.mark.parametrize("kind", PANES, ids=lambda kind: kind.name)
def test_a_table_that_is_too_narrow_is_cut_at_its_right_and_shows_where(
    kind: PaneKind, width: int
) -> None:
    long = Row(key="a", cells=tuple(text_cell("x" * 60) for _ in kind.columns))
    widths = widths_of(kind.columns, [long], width)
    cells = [
        fitted(cell, column, room)
        for cell, column, room in zip(long.cells, kind.columns, widths, strict=True)
        if room
    ]
    assert cell_len(GAP.join(cells)) in range(width - len(GAP), width + 1)
    assert all(ELLIPSIS in cell for cell in cells)


@pytest.mark.parametrize("width", [79, 80, 88, 94, 98, 99, 100, 104, 114, 120, 200])
@pytest.mark.parametrize("kind", PANES, ids=lambda kind: kind.name)
def test_the_least_of_every_pane_fits_in_any_width(kind: object, width: int) -> None:
    columns = next(one.columns for one in PANES if one is kind)
    shown = [one for one in columns if one.from_width <= width]
    assert sum(one.least for one in shown) + len(GAP) * (len(shown) - 1) <= width


def rows(*names: str) -> list[Row]:
    return [
        Row(key=name, cells=(text_cell(name), number_cell(str(len(name)), len(name))))
        for name in names
    ]


@pytest.mark.parametrize(
    ("wanted", "column", "is_reversed", "keys"),
    [
        ("", None, False, ["bb", "a", "CCC"]),
        ("", None, True, ["CCC", "a", "bb"]),
        ("", 0, False, ["a", "bb", "CCC"]),
        ("", 1, True, ["CCC", "bb", "a"]),
        ("cc", None, False, ["CCC"]),
        ("zz", None, False, []),
    ],
)
def test_rows_are_filtered_and_sorted(
    wanted: str, column: int | None, is_reversed: bool, keys: list[str]
) -> None:
    row_filter = RowFilter(wanted=wanted, column=column, is_reversed=is_reversed)
    kept = arranged(rows("bb", "a", "CCC"), row_filter)
    assert [row.key for row in kept.rows] == keys


def test_a_column_of_figures_and_of_none_is_sorted_all_the_same() -> None:
    mixed = [
        Row(key=str(order), cells=(Cell(text="x", order=order),)) for order in (2.0, "b", -1.0, "")
    ]
    kept = arranged(mixed, RowFilter(column=0))
    assert [row.key for row in kept.rows] == ["-1.0", "2.0", "", "b"]
