"""Tables for people: drawn and coloured in a terminal, plain columns when piped."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click
import msgspec

from headgate.core.text import did_you_mean, nearest, printable
from headgate.errors import CallerError

if TYPE_CHECKING:
    from rich.table import Table

    from headgate.client.sync_client import SyncClient

Thing = TypeVar("Thing")

Row = Sequence[str]


FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
"""The pictures of a spinner, one after another."""

TABLE_ROWS = 500
NARROW_COLUMNS = 40
WIDEST_COLUMNS = 10_000
CELL_FRAME = 3
LEAST_TEXT = 16


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


_RUN_TIMES = frozenset(
    ("began_at", "ended_at", "created_at", "started_at", "completed_at", "as_of")
)


def run_json(value: object) -> Any:  # noqa: ANN401 - any JSON
    """Return what is known of a run as JSON values, with times as other commands write them.

    A run keeps Unix seconds; its folder must not change for that.
    """
    return _with_times(msgspec.to_builtins(value))


def _with_times(value: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, list | tuple):
        return [_with_times(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: moment_of(one)
        if name in _RUN_TIMES and isinstance(one, int | float)
        else _with_times(one)
        for name, one in value.items()
    }


def print_table(
    title: str,
    header: Row,
    rows: Sequence[Row],
    *,
    whole: Row = (),
    spare: Row = (),
    file: TextIO | None = None,
) -> None:
    """Write one table with its title; columns that are named in `whole` are not broken.

    Where a terminal is too narrow for a row on one line, columns of `spare` are left out, the first
    of them first.
    """
    if is_terminal(file):
        from rich.console import Console  # noqa: PLC0415  rich is slow to import, and unused in a pipe

        console = Console(file=file)
        shown = fitting_columns(header, rows, spare, console.width)
        table = drawn_table(title, *shown, whole=whole)
        unbounded = console.options.update(max_width=WIDEST_COLUMNS)
        least = console.measure(table, options=unbounded).minimum
        # Between lines there is no room here; without them it can at least be read.
        if console.width >= min(least, NARROW_COLUMNS):
            console.print(table)
            return
    click.echo(plain_table(title, header, rows), file=file)


def fitting_columns(
    header: Row, rows: Sequence[Row], spare: Row, width: int
) -> tuple[list[str], list[list[str]]]:
    """Leave out columns until a row fits on one line: empty ones, then those of `spare`.

    A last column that is spare is a text, which is cut to what the others leave.
    """
    shown = [list(header), *_printable(rows)]
    last = len(header) - 1
    has_text = header[last] in spare
    needed = [max(map(len, column)) for column in zip(*shown, strict=True)]
    if has_text:
        needed[last] = min(needed[last], LEAST_TEXT)
    kept = [at for at, name in enumerate(header) if name not in spare or any(r[at] for r in rows)]
    for name in spare:
        left = width - 1 - sum(needed[at] + CELL_FRAME for at in kept)
        if left >= 0:
            break
        kept = [at for at in kept if header[at] != name]
    else:
        left = 0
    if has_text and last in kept:
        most = needed[last] + left
        for row in shown:
            row[last] = row[last] if len(row[last]) <= most else f"{row[last][: most - 1]}…"
    head, *lines = [[row[at] for at in kept] for row in shown]
    return head, lines


def print_tables(
    title: str,
    header: Row,
    rows: Iterable[Row],
    *,
    empty: str,
    whole: Row = (),
    spare: Row = (),
) -> None:
    """Write a table for every few hundred rows: a long list is neither kept nor waited for."""
    left = iter(rows)
    shown = list(islice(left, TABLE_ROWS))
    if not shown:
        click.echo(empty)
    while shown:
        print_table(title, header, shown, whole=whole, spare=spare)
        shown = list(islice(left, TABLE_ROWS))


def tell_more(left: Iterator[object], limit: int) -> None:
    """Say on standard error that a list was cut, if anything is left of it."""
    if next(left, None) is not None:
        click.echo(f"headgate: {limit:,} shown, more exist; --limit N or --all", err=True)


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
        is_whole = name in whole
        # A word that is too long goes on in the next line: half of a name names nothing.
        table.add_column(name, no_wrap=is_whole, overflow="ellipsis" if is_whole else "fold")
    for row in _printable(rows):
        table.add_row(*(Text(cell) for cell in row))
    return table


# Times as people write and read them: `10m` on a command line, `in 12 min` in a table.

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd])")
_LARGEST_SECONDS = 3650 * 86400
_STEPS = ((86400 * 2, 86400, "days"), (5400, 3600, "h"), (90, 60, "min"))


def duration(text: str) -> float:
    """Read a length of time from an option, as seconds."""
    seconds = _seconds(text)
    if seconds is None:
        message = f"{text!r} is not a time such as 30s, 10m, 2h or 1d"
        raise click.BadParameter(message)
    return seconds


def moment(text: str) -> timedelta | str:
    """Read a time from an option: a length from now on, or one of RFC 3339."""
    seconds = _seconds(text)
    if seconds is not None:
        return timedelta(seconds=seconds)
    try:
        has_zone = datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        has_zone = False
    if not has_zone:
        message = f"{text!r} is neither a length of time, as 10m, nor one as 2030-01-31T18:00:00Z"
        raise click.BadParameter(message)
    return text


def past_moment(text: str) -> str:
    """Read a time from an option: a length back from now, or one of RFC 3339."""
    read = moment(text)
    return (datetime.now(UTC) - read).isoformat() if isinstance(read, timedelta) else read


def _seconds(text: str) -> float | None:
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        return None
    seconds = float(found[1]) * _UNITS[found[2]]
    return seconds if 0 < seconds <= _LARGEST_SECONDS else None


def length_of(seconds: float) -> str:
    """Return a length of time in the unit in which it is best read."""
    for least, unit, name in _STEPS:
        if seconds >= least:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{max(0.0, seconds):.1f} s"  # noqa: PLR2004


def tasks_or_calls(number: int) -> str:
    """Count what may be tasks and calls."""
    return "1 task or call" if number == 1 else f"{number:,} tasks or calls"


def from_now(moment: datetime, now: datetime | None = None) -> str:
    """Return how far a time is away, in either direction."""
    seconds = (moment - (now or datetime.now(UTC))).total_seconds()
    return f"in {length_of(seconds)}" if seconds > 0 else f"{length_of(-seconds)} ago"


def has_come(moment: datetime, now: datetime | None = None) -> bool:
    """Tell whether a time is not ahead any more."""
    return moment <= (now or datetime.now(UTC))


def countdown(moment: datetime, now: datetime | None = None) -> str:
    """Return how long it is until a time, as `4 h 12 min`; `now` when it has come."""
    now = now or datetime.now(UTC)
    if has_come(moment, now):
        return "now"
    seconds = (moment - now).total_seconds()
    hours, minutes = divmod(round(seconds / 60), 60)
    if not hours or hours >= 48:  # noqa: PLR2004 - beyond two days nobody counts minutes
        return length_of(seconds)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


# The zone in which a command shows times: that of this machine, or UTC with --utc.

_UTC_TEXT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2} UTC")
_zone: list[tzinfo | None] = [None]


def with_utc_option(command: click.Command) -> click.Command:
    """Give a command, or each one of a group, the option that shows times in UTC."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            with_utc_option(inner)
    if not isinstance(command, click.Group) or command.invoke_without_command:
        option = click.Option(
            ["--utc"],
            is_flag=True,
            expose_value=False,
            callback=_choose_zone,
            help="Show times in UTC, not in the local zone.",
        )
        command.params.append(option)
    return command


def _choose_zone(context: click.Context, _: click.Parameter, is_utc: bool) -> None:  # noqa: FBT001
    # What was said before the name of a command within a group holds for that command too.
    context.meta["utc"] = is_utc or context.meta.get("utc", False)
    _zone[0] = UTC if context.meta["utc"] else None


def has_days(*moments: datetime) -> bool:
    """Tell whether times that are shown together lie on several days, in the zone shown."""
    return len({one.astimezone(_zone[0]).date() for one in moments}) > 1


def clock_time(moment: datetime, *, now: datetime | None = None, has_day: bool = False) -> str:
    """Return a time with the name of its zone, and with its day unless that is today.

    Every time that a command shows goes through here. With `has_day` today has its day, too.
    """
    local = moment.astimezone(_zone[0])
    is_today = local.date() == (now or datetime.now(UTC)).astimezone(_zone[0]).date()
    is_today = is_today and not has_day
    text = f"{local:%H:%M:%S}" if is_today else f"{local:%Y-%m-%d %H:%M:%S}"
    return f"{text} {local.tzname()}"


def with_local_times(text: str) -> str:
    """Return what a service said, with its times in the zone that commands show."""

    def shown(found: re.Match[str]) -> str:
        moment = datetime.strptime(found[0], "%Y-%m-%d %H:%M:%S %Z").replace(tzinfo=UTC)
        return clock_time(moment)

    return _UTC_TEXT.sub(shown, text)


def moment_of(seconds: float) -> datetime | None:
    """Return Unix seconds as a time; None where no calendar reaches that far."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        return None


# Names that the service does not know: which ones there are, and how to add one.

MOST_NAMES = 20


def unknown_name(noun: str, name: str, known: Sequence[str], advice: str) -> CallerError:
    """Return the error about a name: what may be meant, what there is, and how to add it."""
    near = nearest(name, known)
    meant = f"; {did_you_mean(near)}" if near else "."
    names = ", ".join(known[:MOST_NAMES])
    more = f" and {len(known) - MOST_NAMES:,} more" if len(known) > MOST_NAMES else ""
    listed = f" {noun.capitalize()}s: {names}{more}." if known else ""
    return CallerError(f"There is no {noun} {name}{meant}{listed} {advice}")


def naming_unknown(
    found: Iterator[Thing],
    client: SyncClient,
    *,
    project: str | None,
    agent: str | None,
    target: str | None = None,
) -> Iterator[Thing]:
    """Give what was found; if that is nothing, say which filters name nothing that there is."""
    is_empty = True
    for one in found:
        is_empty = False
        yield one
    if is_empty:
        from headgate.cli.resources import AGENTS, PROJECTS, TARGETS  # noqa: PLC0415

        for noun, name in ((PROJECTS, project), (AGENTS, agent), (TARGETS, target)):
            if name:
                noun.warn_of_unknown(client, name)
