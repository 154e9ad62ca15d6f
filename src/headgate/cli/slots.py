"""`headgate slots`: how much of each quota is used, wakes by hand, the log, and slots alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from headgate.cli.connection import (
    Connection,
    config_option,
    connect,
    connection_options,
    data_option,
    default_directory,
    json_option,
    store_option,
)
from headgate.cli.fake_provider import fake_provider
from headgate.cli.output import (
    countdown,
    from_now,
    has_come,
    print_json,
    print_json_lines,
    print_table,
)
from headgate.core.slots.wakes import ENDED, ended_words
from headgate.core.text import printable
from headgate.errors import InvalidSettingError

if TYPE_CHECKING:
    from headgate.client.local_slots import SlotsAlone
    from headgate.client.sync_client import SyncClient
    from headgate.core.slots.status import (
        LogLine,
        LoopBody,
        QuotaLimitBody,
        SlotBody,
    )


# `headgate slots log`: what was sent for slots, what came back, and what happened.
#
# The files of the data directory are read, so that the log is there without a service too.

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
        from headgate.engine.slots.slot_log import read_log  # noqa: PLC0415

        folder = _folder(data)
        news = _News.behind(folder) if is_following else None
        lines = read_log(folder, slot=name, day=day, tail=tail)
        _print(lines, as_json=as_json)
        if news is not None:
            _follow(news, name, lines, as_json=as_json)
        elif not lines:
            click.echo(f"headgate: no such lines in {folder}", err=True)


def _folder(data: Path | None) -> Path:
    from headgate.engine.slots.slot_log import LOG_FOLDER  # noqa: PLC0415

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
        from headgate.engine.slots.slot_log import log_files  # noqa: PLC0415

        files = log_files(folder)
        return cls(folder, files[-1], files[-1].stat().st_size) if files else cls(folder, None, 0)

    def read(self) -> tuple[list[LogLine], _News]:
        """Return the whole lines that have come, and the place behind them."""
        from headgate.engine.slots.slot_log import log_files  # noqa: PLC0415

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
    from headgate.core.slots.status import LogLine  # noqa: PLC0415

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
    from headgate.engine.slots.slot_log import line_text  # noqa: PLC0415

    parts = (line.ts, line.slot, line.action, line.phase, line_text(line))
    return "  ".join(part for part in parts if part)


# `headgate slots run`: slots alone, without API, dispatcher or tasks.


@click.command(
    epilog="""\b
Examples:
  headgate slots run
  headgate slots run --config slots.toml --data ./slots
  headgate slots run --json 2>> slots.log
"""
)
@config_option
@data_option
@store_option
@json_option
def run(*, path: Path | None, data: Path | None, store_url: str | None, as_json: bool) -> None:
    """Poll and wake slots, and do nothing else.

    What happens is written to standard error, with --json as lines of JSON. The settings are read
    again when their file changes. Ctrl-C ends it.
    """
    from headgate.extras import naming_extras  # noqa: PLC0415  not for a list of commands

    with naming_extras("headgate slots run"):
        from headgate.cli.slots_alone import run_alone  # noqa: PLC0415

        run_alone(path, data, store_url, as_json=as_json)


WARM_SECONDS = 60.0


@contextmanager
def _asking(
    connection: Connection, *, retries: int = 3, timeout_seconds: float = 30.0
) -> Iterator[SyncClient | SlotsAlone]:
    """Give whoever has the slots: a process that runs them alone here, or the service."""
    directory = alone_in(connection)
    if directory is not None:
        from headgate.client.local_slots import SlotsAlone  # noqa: PLC0415

        yield SlotsAlone(directory, timeout_seconds=timeout_seconds)
        return
    with connect(connection, retries=retries, timeout_seconds=timeout_seconds) as client:
        yield client


def alone_in(connection: Connection) -> Path | None:
    """Return the data directory in which slots run alone; None where a service is to be asked."""
    named = os.environ.get("HEADGATE_URL") if connection.data is None else None
    directory = connection.data or default_directory()
    if connection.url or named or directory is None:
        return None
    from headgate.client.local_slots import connected_socket  # noqa: PLC0415

    try:
        connected_socket(directory, LOOK_SECONDS).close()
    except OSError:
        return None
    return directory


def _given(_: click.Context, __: click.Parameter, name: str | None) -> str | None:
    if name == "":
        message = "must not be empty; headgate slots status lists the names"
        raise click.BadParameter(message)
    return name


_name_argument = click.argument("name", callback=_given)


@click.group()
def slots() -> None:
    """Show key slots and wake them, switch them, read their log, run them alone."""


@slots.command(
    epilog="""\b
Examples:
  headgate slots status
  headgate slots status work
  headgate slots status --json | jq -r 'select(.state == "exhausted") | .name'
"""
)
@click.argument("name", required=False, callback=_given)
@connection_options
@json_option
def status(*, name: str | None, connection: Connection, as_json: bool) -> None:
    """Print quotas, resets and the next wakes.

    A line for each slot; with NAME, everything that is known of that one.
    """
    with _asking(connection) as client:
        if name is not None:
            _print_one(client.slot(name), as_json=as_json)
            return
        found = client.slots().slots
    if as_json:
        print_json_lines(found)
    elif found:
        print_table("Slots", HEADER, [row_of(one) for one in found], whole=WHOLE)
        for line in notes_of(found):
            click.echo(line)
    else:
        click.echo("no slots are configured; [[slots]] in the settings file makes one", err=True)


@slots.command(
    epilog="""\b
Examples:
  headgate slots warm work
  headgate slots warm work --json | jq -r .resetsAt
"""
)
@_name_argument
@connection_options
@json_option
def warm(*, name: str, connection: Connection, as_json: bool) -> None:
    """Open the window of a slot now.

    Refused while it is open, and while the slot is disabled, paused, exhausted, being read or
    being confirmed.
    """
    # A wake that is sent twice may cost twice.
    with _asking(connection, retries=0, timeout_seconds=WARM_SECONDS) as client:
        answer = client.warm_slot(name, timeout_seconds=WARM_SECONDS)
    if as_json:
        print_json(answer)
    else:
        click.echo(printable(f"{answer.name}: {_warmed(answer)}"))


@slots.command(
    epilog="""\b
Examples:
  headgate slots enable work
"""
)
@_name_argument
@connection_options
@json_option
def enable(*, name: str, connection: Connection, as_json: bool) -> None:
    """Poll and wake a slot again.

    Whatever had disabled it, except the settings; its errors are forgotten.
    """
    with _asking(connection) as client:
        answer = client.enable_slot(name)
    _print_switched(answer, as_json=as_json)


@slots.command(
    epilog="""\b
Examples:
  headgate slots disable work
"""
)
@_name_argument
@connection_options
@json_option
def disable(*, name: str, connection: Connection, as_json: bool) -> None:
    """Leave a slot alone; its tasks wait.

    It is neither polled nor woken until it is enabled again.
    """
    with _asking(connection) as client:
        answer = client.disable_slot(name)
    _print_switched(answer, as_json=as_json)


slots.add_command(log)
slots.add_command(run)
slots.add_command(fake_provider)


def _print_one(slot: SlotBody, *, as_json: bool) -> None:
    if as_json:
        print_json(slot)
        return

    click.echo("\n".join(lines_of(slot)))


def _print_switched(slot: SlotBody, *, as_json: bool) -> None:
    if as_json:
        print_json(slot)
        return
    standing = "enabled" if slot.enabled else slot.disabled_reason or "disabled"
    click.echo(printable(f"{slot.name} is {standing}"))


def _warmed(slot: SlotBody) -> str:
    from headgate.cli.output import countdown  # noqa: PLC0415

    if slot.wake_pending or slot.resets_at is None:
        return f"a wake was sent; headgate slots status {slot.name} says when it is confirmed"
    return f"a wake was sent and confirmed; the window resets in {countdown(slot.resets_at)}"


# A slot as people read it: one line of a table, or everything that is known.

HEADER = ("slot", "state", "used", "resets in", "next wake", "confirmed", "errors")
WHOLE = ("slot", "state", "used", "resets in", "confirmed")


def row_of(slot: SlotBody) -> tuple[str, ...]:
    """Return one line of a table of slots."""
    return (
        slot.name,
        slot.state,
        percent(slot.percent_used),
        "" if slot.resets_at is None else _reset_soon(slot.resets_at),
        _wake_soon(slot),
        _confirmation(slot),
        _errors(slot),
    )


def notes_of(slots: Sequence[SlotBody]) -> list[str]:
    """Return what a column would have no room for: why tasks wait, why a wake will be skipped."""
    waits = [f"  tasks of {one.name} wait: {_wait(one)}" for one in slots if one.wait_reason]
    skipped = [
        f"  next wake of {one.name}: {one.next_wake.text}"
        for one in slots
        if one.next_wake is not None and one.next_wake.is_skipped
    ]
    return [printable(line) for line in (*waits, *skipped)]


def lines_of(slot: SlotBody) -> list[str]:
    """Return everything that is known of a slot, a line for each thing."""
    found = [(name, text) for name, text in _facts(slot) if text]
    width = max(len(name) for name, _ in found)
    lines = [f"{name:<{width}}  {printable(text)}" for name, text in found]
    return lines + [f"{'limit':<{width}}  {printable(_limit(slot, one))}" for one in slot.limits]


def percent(value: float | None) -> str:
    """Return how much is used, without decimals that nobody needs."""
    return "" if value is None else f"{value:.1f}".removesuffix(".0") + "%"


def _facts(slot: SlotBody) -> list[tuple[str, str]]:
    return [
        ("slot", slot.name),
        ("provider", slot.provider),
        ("plan", slot.level or ""),
        ("state", slot.state),
        ("reason", "" if slot.wait_reason == slot.disabled_reason else slot.disabled_reason),
        ("holds tasks", _wait(slot)),
        ("closed by", _closers(slot)),
        ("only for", ", ".join(slot.projects or ())),
        ("used", percent(slot.percent_used)),
        ("resets", _reset(slot)),
        ("quota from", f"{slot.quota_from}: {slot.quota_text}"),
        ("read", _at(slot, slot.read_at)),
        ("next poll", _at(slot, slot.next_poll_at)),
        ("wake modes", ", ".join(slot.wake_modes) or "none: it is never woken"),
        ("next wake", _wake(slot)),
        ("last wake", _at(slot, slot.last_wake_at)),
        ("confirmed", _confirmation(slot)),
        ("errors", _errors(slot) or "none"),
        ("last error", slot.last_error),
        ("wake loop", _loop(slot.wake_loop)),
        ("quota loop", _loop(slot.quota_loop)),
    ]


def _wait(slot: SlotBody) -> str:
    if not slot.wait_reason or slot.wait_until is None:
        return slot.wait_reason
    return f"{slot.wait_reason}, until {_at(slot, slot.wait_until)}"


def _closers(slot: SlotBody) -> str:
    lines = []
    for one in slot.closures:
        by = " ".join(text for text in (one.cause, one.by) if text)
        task = f", task {one.task_id}" if one.task_id else ""
        since = "" if one.since is None else f", since {_at(slot, one.since)}"
        lines.append(f"{by}{task}{since}")
    return "; ".join(line for line in lines if line)


def _reset_soon(resets_at: datetime) -> str:
    return ENDED if has_come(resets_at) else countdown(resets_at)


def _reset(slot: SlotBody) -> str:
    resets_at = slot.resets_at
    if resets_at is None or not has_come(resets_at):
        return _at(slot, resets_at)
    return ended_words(from_now(resets_at))


def _wake_soon(slot: SlotBody) -> str:
    wake = slot.next_wake
    if wake is not None:
        return f"{countdown(wake.at)}: {'skipped' if wake.is_skipped else wake.mode}"
    if not slot.wake_modes:
        return "never"
    return "" if slot.wakes_enabled else "disabled"


def _wake(slot: SlotBody) -> str:
    return "" if slot.next_wake is None else slot.next_wake.text


def _confirmation(slot: SlotBody) -> str:
    if slot.wake_pending:
        return "pending"
    return "" if slot.last_confirmed_at is None else from_now(slot.last_confirmed_at)


def _errors(slot: SlotBody) -> str:
    counted = (("poll", slot.poll_errors), ("wake", slot.wake_errors))
    return ", ".join(f"{count} {noun}" for noun, count in counted if count)


def _loop(loop: LoopBody | None) -> str:
    if loop is None or (loop.last_step_at is None and not loop.problem):
        return ""
    seen = "" if loop.last_step_at is None else f"seen {from_now(loop.last_step_at)}"
    times = "once" if loop.restarts == 1 else f"{loop.restarts} times"
    restarts = f"restarted {times}" if loop.restarts else ""
    return ", ".join(part for part in (seen, restarts, loop.problem) if part)


def _limit(slot: SlotBody, limit: QuotaLimitBody) -> str:
    unit = "" if limit.unit is None else f"unit {limit.unit}"
    resets = "" if limit.resets_at is None else _limit_reset(slot, limit.resets_at)
    used = "" if limit.percent_used is None else f"{percent(limit.percent_used)} used"
    return ", ".join(part for part in (limit.type, unit, used, resets) if part)


def _limit_reset(slot: SlotBody, resets_at: datetime) -> str:
    return f"{ENDED if has_come(resets_at) else 'resets'} {_at(slot, resets_at)}"


def _at(slot: SlotBody, moment: datetime | None) -> str:
    """Return a time by the clock of the slot's own zone, and how far away it is."""
    if moment is None:
        return ""
    from headgate.core.slots.status import local_time  # noqa: PLC0415
    from headgate.storage.zones import zone  # noqa: PLC0415

    try:
        of_slot, name = zone(slot.zone), slot.zone
    except InvalidSettingError:
        of_slot, name = UTC, "UTC"
    at = local_time(moment.timestamp(), of_slot, now=datetime.now(UTC).timestamp())
    return f"{at} {name} ({from_now(moment)})"
