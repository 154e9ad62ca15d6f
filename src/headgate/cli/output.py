"""Tables for people: drawn and coloured in a terminal, plain columns when piped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

import click
import msgspec

from headgate.core.texts.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

Row = Sequence[str]


NARROW_COLUMNS = 40
WIDEST_COLUMNS = 10_000


def is_terminal(file: TextIO | None = None) -> bool:
    """Say whether a file, or else standard output, is looked at by a person."""
    # A program that was started with a closed output has none at all.
    stream = sys.stdout if file is None else file
    return stream is not None and stream.isatty()


def is_drawable(file: TextIO | None = None) -> bool:
    """Say whether a file, or else standard output, is a terminal where a cursor can be moved."""
    return is_terminal(file) and os.environ.get("TERM", "") not in ("dumb", "unknown")


def print_json(value: object, *, file: TextIO | None = None) -> None:
    """Write a value as indented JSON, to standard output if no file is given."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2), file=file)


def print_json_lines(values: Iterable[object]) -> None:
    """Write each value as one line of JSON."""
    for value in values:
        click.echo(msgspec.json.encode(value))


def print_table(
    title: str,
    header: Row,
    rows: Sequence[Row],
    *,
    whole: Row = (),
    file: TextIO | None = None,
) -> None:
    """Write one table with its title; columns that are named in `whole` are not broken."""
    if is_terminal(file):
        from rich.console import Console  # noqa: PLC0415  rich is slow to import, and unused in a pipe

        console, table = Console(file=file), drawn_table(title, header, rows, whole=whole)
        unbounded = console.options.update(max_width=WIDEST_COLUMNS)
        least = console.measure(table, options=unbounded).minimum
        # Between lines there is no room here; without them it can at least be read.
        if console.width >= min(least, NARROW_COLUMNS):
            console.print(table)
            return
    click.echo(plain_table(title, header, rows), file=file)


def plain_table(title: str, header: Row, rows: Sequence[Row]) -> str:
    """Return a table as aligned columns."""
    shown = (header, *_printable(rows))
    widths = [max(len(cell) for cell in column) for column in zip(*shown, strict=True)]
    lines = [title]
    for row in shown:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _printable(rows: Sequence[Row]) -> list[list[str]]:
    """Write out control characters: an id must not be able to move the reader's cursor."""
    return [[printable(cell) for cell in row] for row in rows]


def drawn_table(title: str, header: Row, rows: Sequence[Row], *, whole: Row = ()) -> Table:
    """Return a table as rich draws it."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(title=title, title_justify="left", header_style="bold")
    for name in header:
        table.add_column(name, no_wrap=name in whole)
    for row in _printable(rows):
        table.add_row(*(Text(cell) for cell in row))
    return table
