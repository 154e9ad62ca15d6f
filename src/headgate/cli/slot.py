"""`headgate slot`: the quota of each key, wakes by hand, pauses, the log, and slots alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from headgate.cli.completion import SLOT
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
from headgate.cli.output import (
    clock_time,
    countdown,
    from_now,
    has_come,
    print_json,
    print_json_lines,
    print_table,
    unknown_name,
    with_local_times,
)
from headgate.cli.resources import Limit, check_given, given
from headgate.core.slots.wakes import ENDED, ended_words
from headgate.core.text import printable
from headgate.errors import InvalidSettingError, RequestRefusedError

if TYPE_CHECKING:
    from headgate.cli.command_client import CommandClient
    from headgate.client.local_slots import SlotsAlone
    from headgate.core.slots.status import (
        LogLine,
        LoopBody,
        NextWakeBody,
        QuotaLimitBody,
        SlotBody,
    )


# `headgate slot log`: what was sent for slots, what came back, and what happened.
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
  headgate slot log
  headgate slot log work --follow
  headgate slot log --day 2027-01-31 --json | jq 'select(.phase == "error")'
"""
)
@click.argument("slot", metavar="[SLOT]", required=False)
@click.option(
    "--follow",
    "-f",
    "is_following",
    is_flag=True,
    help="Print new lines as they come, until Ctrl-C.",
)
@click.option("--day", metavar="DAY", type=_day, help="Only this day in UTC, such as 2027-01-31.")
@click.option(
    "--tail",
    metavar="N",
    type=click.IntRange(1, MOST_LINES),
    default=LINES_SHOWN,
    show_default=True,
    help="How many lines to print, counted from the end.",
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
    slot: str | None,
    is_following: bool,
    day: date | None,
    tail: int,
    data: Path | None,
    as_json: bool,
) -> None:
    """Show the requests that Headgate sent for slots, their responses, and other events.

    With SLOT, show only that slot. The log is read from the data directory, so it works without a
    running service.
    """
    if is_following and day is not None:
        message = "--follow prints new lines of today; leave out --day"
        raise click.UsageError(message)
    from headgate.engine.slots.slot_log import read_log  # noqa: PLC0415  not for a list of commands

    folder = _folder(data)
    news = _News.behind(folder) if is_following else None
    lines = read_log(folder, slot=slot, day=day, tail=tail)
    _print(lines, as_json=as_json)
    if news is not None:
        _follow(news, slot, lines, as_json=as_json)
    elif not lines:
        click.echo(f"headgate: There are no such lines in {folder}", err=True)


def _folder(data: Path | None) -> Path:
    from headgate.engine.slots.slot_log import LOG_FOLDER  # noqa: PLC0415

    directory = data or default_directory()
    if directory is None:
        raise InvalidSettingError("--data", "name the service's data directory")
    if data is not None and not data.is_dir():
        raise InvalidSettingError("--data", f"{data} is not a directory; name the service's")
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

    at = line.ts
    # Somebody may have written to the file by hand.
    with suppress(ValueError):
        at = clock_time(datetime.fromisoformat(line.ts), has_day=True)
    parts = (at, line.slot, line.action, line.phase, line_text(line))
    return "  ".join(part for part in parts if part)


# `headgate slot run`: slots alone, without API, dispatcher or tasks.


@click.command(
    epilog="""\b
Examples:
  headgate slot run
  headgate slot run --config slots.toml --data ./slots
  headgate slot run --json 2>> slots.log
"""
)
@config_option
@data_option
@store_option
@json_option
def run(*, path: Path | None, data: Path | None, store_url: str | None, as_json: bool) -> None:
    """Run key slots alone: poll and wake them, without a service.

    The log goes to standard error; with --json, as lines of JSON. The command reads a changed
    settings file again. Ctrl-C stops the command.
    """
    from headgate.cli.slots_alone import run_alone  # noqa: PLC0415  not for a list of commands

    run_alone(path, data, store_url, as_json=as_json)


WARM_SECONDS = 60.0


@contextmanager
def _asking(
    connection: Connection, *, retries: int = 3, timeout_seconds: float = 30.0
) -> Iterator[CommandClient | SlotsAlone]:
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


def _given(_: click.Context, __: click.Parameter, name: str) -> str:
    if name == "":
        message = "must not be empty; headgate slot list shows the names"
        raise click.BadParameter(message)
    return name


_slot_argument = click.argument("name", metavar="SLOT", type=SLOT, callback=_given)


@click.group()
def slot() -> None:
    """Show key slots and their quotas; warm, change, pause and drain slots.

    A slot is one key of a provider with a quota. [[slots]] in the settings file adds one.
    """


@slot.command(
    "list",
    epilog="""\b
Examples:
  headgate slot list
  headgate slot list --json | jq -r 'select(.state == "exhausted") | .name'
""",
)
@connection_options
@json_option
def list_slots(*, connection: Connection, as_json: bool) -> None:
    """List key slots: how much of each quota is used, when it resets, the next wake."""
    with _asking(connection) as client:
        found, place = client.slots().slots, client.place
    if as_json:
        print_json_lines(found)
    elif found:
        rows = [row_of(one) for one in found]
        print_table("Slots", HEADER, rows, whole=WHOLE, spare=SPARE)
        for line in notes_of(found):
            click.echo(line)
    else:
        click.echo(printable(f"headgate: There are no slots {place}. {_ADD}"), err=True)


_ADD = "[[slots]] in the settings file adds one; then run headgate reload."


@slot.command(
    epilog="""\b
Examples:
  headgate slot show work
  headgate slot show work --json | jq .limits
"""
)
@_slot_argument
@connection_options
@json_option
def show(*, name: str, connection: Connection, as_json: bool) -> None:
    """Show everything about a key slot."""
    with _asking(connection) as client, _naming_slots(client, name):
        answer = client.slot(name)
    if as_json:
        print_json(answer)
    else:
        click.echo("\n".join(lines_of(answer)))


@slot.command(
    epilog="""\b
Examples:
  headgate slot warm work
  headgate slot warm work --json | jq -r .resetsAt
"""
)
@_slot_argument
@connection_options
@json_option
def warm(*, name: str, connection: Connection, as_json: bool) -> None:
    """Open the quota window of a key slot now.

    Headgate refuses this while the window is open, and while the slot is paused, exhausted or being
    read.
    """
    # A wake that is sent twice may cost twice.
    with (
        _asking(connection, retries=0, timeout_seconds=WARM_SECONDS) as client,
        _naming_slots(client, name),
    ):
        answer = client.warm_slot(name, timeout_seconds=WARM_SECONDS)
    if as_json:
        print_json(answer)
    else:
        click.echo(printable(f"{answer.name}: {_warmed(answer)}"))


@slot.command(
    epilog="""\b
Examples:
  headgate slot pause work
"""
)
@_slot_argument
@connection_options
@json_option
def pause(*, name: str, connection: Connection, as_json: bool) -> None:
    """Pause a key slot: nothing is sent with its key, and tasks and calls that need it wait."""
    with _asking(connection) as client, _naming_slots(client, name):
        answer = client.disable_slot(name)
    line = "is paused: nothing is sent with its key; calls and tasks that need the key wait."
    _print_switched(
        answer, f"{line} headgate slot resume {answer.name} ends this.", as_json=as_json
    )


@slot.command(
    epilog="""\b
Examples:
  headgate slot resume work
"""
)
@_slot_argument
@connection_options
@json_option
def resume(*, name: str, connection: Connection, as_json: bool) -> None:
    """Resume a key slot, whatever stopped it: a pause, its errors, an answer of its provider.

    A slot that the settings disable stays disabled. The provider's next answer may close a slot
    again.
    """
    from headgate.client.local_slots import SlotsAlone  # noqa: PLC0415

    with _asking(connection) as client, _naming_slots(client, name):
        answer = client.enable_slot(name)
        if answer.enabled and answer.closures and not isinstance(client, SlotsAlone):
            client.open("slot", name)
            answer = client.slot(name)
    standing = "is active." if answer.enabled else f"is still {answer.disabled_reason}."
    _print_switched(answer, standing, as_json=as_json)


@slot.command(
    epilog="""\b
Examples:
  headgate slot drain work
"""
)
@_slot_argument
@connection_options
@json_option
def drain(*, name: str, connection: Connection, as_json: bool) -> None:
    """Do the same as headgate slot pause: a slot has no queue of its own to drain."""
    with _asking(connection) as client, _naming_slots(client, name):
        answer = client.disable_slot(name)
    line = "is paused: nothing is sent with its key; what runs with it finishes."
    _print_switched(
        answer, f"{line} headgate slot resume {answer.name} ends this.", as_json=as_json
    )


_FIELDS = {"max-inflight": "max_inflight"}


@slot.command(
    "set",
    epilog="""\b
Examples:
  headgate slot set work --max-inflight 4
  headgate slot set work --max-inflight none
  headgate slot set work --reset max-inflight
""",
)
@_slot_argument
@click.option(
    "--max-inflight",
    type=Limit(int),
    metavar="N|none",
    help="The most tasks and calls that use it at a time.",
)
@click.option(
    "--reset",
    multiple=True,
    type=click.Choice(list(_FIELDS)),
    help="Go back to what the settings file says.",
)
@connection_options
@json_option
def set_slot(
    *,
    name: str,
    max_inflight: Any,  # noqa: ANN401 - a number, or none
    reset: tuple[str, ...],
    connection: Connection,
    as_json: bool,
) -> None:
    """Change a key slot: how many tasks and calls use it at a time.

    The change holds until you change the same key in the settings file.
    """
    change = given({"max_inflight": max_inflight})
    check_given(change, reset)
    with connect(connection) as client, _naming_slots(client, name):
        answer = client.change_slot(name, reset=[_FIELDS[one] for one in reset], **change)
    if as_json:
        print_json(answer)
    else:
        most = answer.max_inflight
        number = "any number of" if most is None else f"at most {most}"
        click.echo(printable(f"Slot {answer.name} takes {number} tasks and calls at a time."))


slot.add_command(log)
slot.add_command(run)


@contextmanager
def _naming_slots(client: CommandClient | SlotsAlone, name: str) -> Iterator[None]:
    """Have the error about a slot that is not there say which ones are."""
    try:
        yield
    except RequestRefusedError as error:
        if error.code != "not_found":
            raise
        known = [one.name for one in client.slots().slots]
        raise unknown_name("slot", name, known, _ADD) from None


def _print_switched(slot: SlotBody, standing: str, *, as_json: bool) -> None:
    if as_json:
        print_json(slot)
    else:
        click.echo(printable(f"Slot {slot.name} {standing}"))


def _warmed(slot: SlotBody) -> str:
    if slot.wake_pending or slot.resets_at is None:
        return f"sent a wake; headgate slot show {slot.name} says when it is confirmed"
    return f"sent a wake, and it is confirmed; the window resets in {countdown(slot.resets_at)}"


# A slot as people read it: one line of a table, or everything that is known.

HEADER = ("slot", "state", "used", "resets in", "next wake", "confirmed", "errors")
WHOLE = ("slot", "state", "used", "resets in")
SPARE = ("confirmed", "next wake")


def row_of(slot: SlotBody) -> tuple[str, ...]:
    """Return one line of a table of slots."""
    return (
        slot.name,
        _state(slot),
        percent(slot.percent_used),
        "" if slot.resets_at is None else _reset_soon(slot.resets_at),
        _wake_soon(slot),
        _confirmation(slot),
        _errors(slot),
    )


def notes_of(slots: Sequence[SlotBody]) -> list[str]:
    """Return what no column has room for: why a slot is closed, why a wake will be skipped."""
    waits = [f"  {one.name} is closed: {_wait(one)}" for one in slots if one.wait_reason]
    wakes = [f"  next wake of {one.name}: {_wake(one)}" for one in slots if _wake_needs_note(one)]
    return [printable(line) for line in (*waits, *wakes)]


def _wake_needs_note(slot: SlotBody) -> bool:
    """Tell whether a wake is skipped or missing; what keeps the whole slot off is told already."""
    if slot.next_wake is not None:
        return slot.next_wake.is_skipped
    return slot.enabled and bool(slot.no_wake_reason)


def lines_of(slot: SlotBody) -> list[str]:
    """Return everything that is known of a slot, a line for each thing."""
    found = [(name, text) for name, text in _facts(slot) if text]
    width = max(len(name) for name, _ in found)
    lines = [f"{name:<{width}}  {printable(text)}" for name, text in found]
    return lines + [f"{'limit':<{width}}  {printable(_limit(one))}" for one in slot.limits]


def percent(value: float | None) -> str:
    """Return how much is used, without decimals that nobody needs."""
    return "" if value is None else f"{value:.1f}".removesuffix(".0") + "%"


def _facts(slot: SlotBody) -> list[tuple[str, str]]:
    return [
        ("slot", slot.name),
        ("provider", slot.provider),
        ("plan", slot.level or ""),
        ("state", _state(slot)),
        ("reason", "" if slot.wait_reason == slot.disabled_reason else slot.disabled_reason),
        ("closed because", _wait(slot)),
        ("closed by", _closers(slot)),
        ("only for", ", ".join(slot.projects or ())),
        ("in use", "" if slot.max_inflight is None else f"at most {slot.max_inflight} at a time"),
        ("used", percent(slot.percent_used)),
        ("resets", _reset(slot)),
        ("quota from", f"{slot.quota_from}: {slot.quota_text}"),
        ("read", _at(slot.read_at)),
        ("next poll", _at(slot.next_poll_at)),
        ("wake zone", slot.zone if slot.wake_modes else ""),
        ("wake modes", ", ".join(slot.wake_modes) or "none: it is never woken"),
        ("next wake", _wake(slot)),
        ("last wake", _at(slot.last_wake_at)),
        ("confirmed", _confirmation(slot)),
        ("errors", _errors(slot) or "none"),
        ("last error", slot.last_error),
        ("wake loop", _loop(slot.wake_loop)),
        ("quota loop", _loop(slot.quota_loop)),
    ]


def _state(slot: SlotBody) -> str:
    from headgate.core.slots.status import state_words  # noqa: PLC0415

    return state_words(slot.state)


def _wait(slot: SlotBody) -> str:
    if not slot.wait_reason or slot.wait_until is None:
        return with_local_times(slot.wait_reason)
    return f"{with_local_times(slot.wait_reason)}, until {_at(slot.wait_until)}"


def _closers(slot: SlotBody) -> str:
    if not slot.closures:
        return ""
    last = slot.closures[0]
    by = " ".join(text for text in (last.cause, last.by) if text)
    task = f", task {last.task_id}" if last.task_id else ""
    since = "" if last.since is None else f", since {_at(last.since)}"
    return f"{by}{task}{since}"


def _reset_soon(resets_at: datetime) -> str:
    return ENDED if has_come(resets_at) else countdown(resets_at)


def _reset(slot: SlotBody) -> str:
    resets_at = slot.resets_at
    if resets_at is None or not has_come(resets_at):
        return _at(resets_at)
    return ended_words(from_now(resets_at))


def _wake_soon(slot: SlotBody) -> str:
    wake = slot.next_wake
    if wake is not None:
        return f"{countdown(wake.at)}: {'skipped' if wake.is_skipped else wake.mode}"
    if not slot.wake_modes:
        return "never"
    return "none" if slot.wakes_enabled or slot.state == "paused" else "disabled"


def _wake(slot: SlotBody) -> str:
    wake = slot.next_wake
    if wake is not None:
        when = "now" if has_come(wake.at) else clock_time(wake.at)
        return f"{when}: {'skipped, ' if wake.is_skipped else ''}{wake_reason(wake)}"
    return f"none: {slot.no_wake_reason}" if slot.no_wake_reason else ""


def wake_reason(wake: NextWakeBody) -> str:
    """Return why a wake is sent, or is skipped; its times are in the zone that commands show."""
    if wake.open_until is None:
        return wake.text.partition(": ")[2].removeprefix("skipped, ")
    then = "" if wake.then is None else f"; the next one at {clock_time(wake.then)}"
    return f"the window is open until {clock_time(wake.open_until)}{then}"


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


def _limit(limit: QuotaLimitBody) -> str:
    unit = "" if limit.unit is None else f"unit {limit.unit}"
    resets = "" if limit.resets_at is None else _limit_reset(limit.resets_at)
    used = "" if limit.percent_used is None else f"{percent(limit.percent_used)} used"
    return ", ".join(part for part in (limit.type, unit, used, resets) if part)


def _limit_reset(resets_at: datetime) -> str:
    return f"{ENDED if has_come(resets_at) else 'resets'} {_at(resets_at)}"


def _at(moment: datetime | None) -> str:
    """Return a time, and how far away it is."""
    return "" if moment is None else f"{clock_time(moment)} ({from_now(moment)})"
