"""`headgate slots log`: what was sent for slots, what came back, and what happened.

The files of the data directory are read, so that the log is there without a service too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from headgate.cli.output import print_json_lines
from headgate.cli.places.connection import json_option
from headgate.cli.times import clock_time
from headgate.core.texts.printable import printable
from headgate.errors import InvalidSettingError

if TYPE_CHECKING:
    from headgate.bodies.slots import LogLine

LINES_SHOWN = 50
MOST_LINES = 10_000
LOOK_SECONDS = 0.5


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        message = f"{text!r} is not a day such as 2027-01-31"
        raise click.BadParameter(message) from None


@click.command(
    epilog="""\b
Examples:
  headgate slots log
  headgate slots log work --follow
  headgate slots log --day 2027-01-31 --json | jq 'select(.phase == "error")'
"""
)
@click.argument("name", required=False)
@click.option("--follow", "-f", "is_following", is_flag=True, help="Go on, until Ctrl-C.")
@click.option("--day", metavar="DAY", type=_day, help="Only this day, in UTC: 2027-01-31.")
@click.option(
    "--tail",
    metavar="N",
    type=click.IntRange(1, MOST_LINES),
    default=LINES_SHOWN,
    show_default=True,
    help="How many of the latest lines.",
)
@click.option(
    "--data",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The service's data directory.  [default: the XDG data directory]",
)
@json_option
def log(
    *,
    name: str | None,
    is_following: bool,
    day: date | None,
    tail: int,
    data: Path | None,
    as_json: bool,
) -> None:
    """Print what was sent and what came back.

    And whatever else happened to slots; with NAME, to that one. It is read from the data
    directory, whether or not a service runs.
    """
    if is_following and day is not None:
        message = "--follow goes on with today; leave out --day"
        raise click.UsageError(message)
    from headgate.extras import naming_extras  # noqa: PLC0415  not for a list of commands

    with naming_extras("headgate slots log"):
        from headgate.slot_logs import read_log  # noqa: PLC0415

        folder = _folder(data)
        news = _News.behind(folder) if is_following else None
        lines = read_log(folder, slot=name, day=day, tail=tail)
        _print(lines, as_json=as_json)
        if news is not None:
            _follow(news, name, lines, as_json=as_json)
        elif not lines:
            click.echo(f"headgate: no such lines in {folder}", err=True)


def _folder(data: Path | None) -> Path:
    from headgate.cli.places.data_directory import default_directory  # noqa: PLC0415
    from headgate.slot_logs import LOG_FOLDER  # noqa: PLC0415

    directory = data or default_directory()
    if directory is None:
        raise InvalidSettingError("--data", "name the service's data directory")
    if data is not None and not data.is_dir():
        raise InvalidSettingError("--data", f"{data} is no directory; name the service's")
    return directory / LOG_FOLDER


class _News(NamedTuple):
    """How far the newest file has been read."""

    folder: Path
    file: Path | None
    offset: int

    @classmethod
    def behind(cls, folder: Path) -> _News:
        """Return the place behind all that there is."""
        from headgate.slot_logs import log_files  # noqa: PLC0415

        files = log_files(folder)
        return cls(folder, files[-1], files[-1].stat().st_size) if files else cls(folder, None, 0)

    def read(self) -> tuple[list[LogLine], _News]:
        """Return the whole lines that have come, and the place behind them."""
        from headgate.slot_logs import log_files  # noqa: PLC0415

        newer = [path for path in log_files(self.folder) if self.file is None or path > self.file]
        lines: list[LogLine] = []
        place = self
        for path in [*([] if self.file is None else [self.file]), *newer]:
            start = place.offset if path == self.file else 0
            content = _from(path, start)
            whole = content[: content.rfind(b"\n") + 1]
            lines += _decoded(whole)
            place = place._replace(file=path, offset=start + len(whole))
        return lines, place


def _from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        # Its days are over, and it was removed.
        return b""


def _decoded(content: bytes) -> Iterator[LogLine]:
    from headgate.bodies.slots import LogLine  # noqa: PLC0415

    for line in content.splitlines():
        try:
            yield msgspec.json.decode(line, type=LogLine)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue


def _follow(place: _News, name: str | None, printed: list[LogLine], *, as_json: bool) -> None:
    # The place was noted before the first lines were read, so that none falls in between.
    seen = {msgspec.json.encode(line) for line in printed}
    while True:
        lines, place = place.read()
        wanted = [line for line in lines if name is None or line.slot == name]
        _print([one for one in wanted if msgspec.json.encode(one) not in seen], as_json=as_json)
        if lines:
            seen.clear()
        time.sleep(LOOK_SECONDS)


def _print(lines: list[LogLine], *, as_json: bool) -> None:
    if as_json:
        print_json_lines(lines)
    else:
        for line in lines:
            click.echo(printable(line_of(line)))


def line_of(line: LogLine) -> str:
    """Return a line of the log as people read it."""
    from headgate.slot_logs import line_text  # noqa: PLC0415

    try:
        at = clock_time(datetime.fromisoformat(line.ts))
    except ValueError:
        at = line.ts
    parts = (at, line.slot, line.action, line.phase, line_text(line))
    return "  ".join(part for part in parts if part)
