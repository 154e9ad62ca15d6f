"""Plain tables for measurements."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[str, ...]


def table(title: str, header: Row, rows: Sequence[Row]) -> None:
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    print(f"\n{title}")
    for row in (header, *rows):
        first = row[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  " + "  ".join((first, *rest)))
