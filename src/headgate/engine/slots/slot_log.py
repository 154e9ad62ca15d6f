"""The log of slots: one file of JSON lines a day, kept for some days, without secrets.

Days are those of UTC, so that the lines of slots in several zones stand in one order. Lines are
written by a thread behind a queue with a bound: what does not fit, or cannot be written, is
dropped, counted and told, and no loop ever waits for a disk.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger

from headgate.core.slots.quota import QuotaFailureKind
from headgate.core.slots.slot import SlotConfig, SlotRow
from headgate.core.slots.status import LogLine, LogPhase
from headgate.core.slots.steps import Observed, PollDone, WakeClaim, WakeDone, WindowDone
from headgate.core.slots.wakes import Confirmation, WakeTrigger, WindowEnd
from headgate.engine.supervisor import Pulse
from headgate.providers.provider import RequestEvent, RequestFailed, RequestSent, ResponseReceived
from headgate.redaction import redacted

log = structlog.get_logger("headgate.slots")

LOG_FOLDER = "logs"
"""The folder of a data directory in which the files lie."""

MAX_QUEUED = 10_000
MAX_BATCH = 1_000
MAX_BODY_CHARS = 4_096
MAX_READ_CHARS = 65_536
"""How much of a body is looked at; the rest is cut off before anything else is done with it."""

MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_TAIL = 10_000
QUICK_LOOK_BYTES = 64 * 1024
MAX_LOOKED_BYTES = 1024 * 1024
"""How much of the files is read for whoever looks at a slot while the service runs."""

MAX_LINE_CHARS = 300
CLOSE_SECONDS = 5.0


class SlotTrail:
    """Writes what one slot sends and gets, and what happens to it; nothing, without a log."""

    def __init__(self, slot: str, slot_log: SlotLog | None = None, *, secret: str = "") -> None:
        self._slot = slot
        self._log = slot_log
        self._secrets = (secret,) if secret else ()

    def hiding(self, secret: str) -> SlotTrail:
        """Return a trail that takes out this key, wherever it turns up."""
        return SlotTrail(self._slot, self._log, secret=secret)

    def sent(self, request: RequestSent) -> None:
        """Write the line of a request."""
        self._tell("request", request, request_body=request.body)

    def received(self, response: ResponseReceived) -> None:
        """Write the line of a response."""
        self._tell(
            "response",
            response,
            status=response.status,
            response_body=response.body,
            duration_ms=round(response.duration_ms, 3),
        )

    def failed(self, failure: RequestFailed) -> None:
        """Write the line of a request without an answer."""
        self._tell(
            "error",
            failure,
            status=failure.status,
            error=failure.error,
            duration_ms=round(failure.duration_ms, 3),
        )

    def event(self, action: str, flow_id: str = "", **details: object) -> None:
        """Write the line of something that happened."""
        self._write(phase="event", action=action, flow_id=flow_id or None, details=details or None)

    def _tell(self, phase: LogPhase, told: RequestEvent, **fields: object) -> None:
        self._write(
            phase=phase,
            action=told.action,
            flow_id=told.flow_id,
            method=told.method,
            url=told.url,
            **fields,
        )

    def _write(self, *, phase: LogPhase, action: str, **fields: object) -> None:
        if self._log is None:
            return
        fields = {name: self._clean(value) for name, value in fields.items()}
        moment = self._log.clock()
        line = {"ts": _timestamp(moment), "slot": self._slot, "action": action, "phase": phase}
        self._log.write(msgspec.convert(line | fields, LogLine), moment)

    def _clean(self, value: object) -> object:
        if isinstance(value, str):
            return _cut(redacted(value[:MAX_READ_CHARS], self._secrets))
        if isinstance(value, dict):
            return {str(name): self._clean(one) for name, one in value.items()}
        return value


class SlotLog:
    """Writes lines to files in a folder; `dropped` counts those that were not written."""

    def __init__(
        self,
        folder: Path,
        *,
        max_log_days: int = 7,
        clock: Callable[[], float] = time.time,
        max_queued: int = MAX_QUEUED,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self.max_log_days = max_log_days
        self.clock = clock
        self.dropped = 0
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._queue: queue.Queue[tuple[date, bytes] | None] = queue.Queue(max_queued)
        self._thread: threading.Thread | None = None
        self._told_dropped = 0
        self._swept: tuple[date, int] | None = None
        self._problem = ""

    def trail(self, slot: str) -> SlotTrail:
        """Return what writes the lines of one slot."""
        return SlotTrail(slot, self)

    def write(self, line: LogLine, moment: float) -> None:
        """Have a line written soon."""
        self._begin()
        try:
            self._queue.put_nowait((_day(moment), msgspec.json.encode(line) + b"\n"))
        except queue.Full:
            self.dropped += 1

    def latest(self, slot: str, most: int) -> list[LogLine]:
        """Return the latest lines of a slot; this reads files, and is for a thread."""
        # A slot that is at work has its lines at the very end; only the others cost more.
        lines = latest_lines(self._folder, slot, most, most_bytes=QUICK_LOOK_BYTES)
        return lines if len(lines) == most else latest_lines(self._folder, slot, most)

    def close(self) -> None:
        """Write what waits, within bounds, and end; a later line begins anew."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self._queue.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        thread.join(CLOSE_SECONDS)

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="slot log", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            lines = [one for one in batch if one is not None]
            self._append_all(lines)
            if len(lines) < len(batch):
                return

    def _next_batch(self) -> list[tuple[date, bytes] | None]:
        batch = [self._queue.get()]
        while batch[-1] is not None and len(batch) < MAX_BATCH:
            try:
                batch.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return batch

    def _append_all(self, lines: list[tuple[date, bytes]]) -> None:
        for day in dict.fromkeys(day for day, _ in lines):
            of_day = [text for its_day, text in lines if its_day == day]
            try:
                self._append(day, of_day)
                self._sweep(day)
                self._tell("")
            except OSError as error:
                self.dropped += len(of_day)
                self._tell(f"{error.strerror or error}")
        self._tell_dropped()

    def _append(self, day: date, lines: list[bytes]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"slots-{day.isoformat()}.jsonl"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.fstat(handle).st_size >= self._max_file_bytes:
                raise OSError(errno.EFBIG, f"{path.name} has all the bytes that it may have")
            # After a failure the last line may be cut off, and the next one must not join it.
            rest = b"\n" * bool(self._problem) + b"".join(lines)
            while rest:
                rest = rest[os.write(handle, rest) :]
        finally:
            os.close(handle)

    def _sweep(self, day: date) -> None:
        """Remove the files of days that are over, once a day."""
        if self._swept == (day, self.max_log_days):
            return
        self._swept = (day, self.max_log_days)
        first_kept = day - timedelta(days=self.max_log_days - 1)
        for path in log_files(self._folder):
            if day_of(path) < first_kept:
                path.unlink(missing_ok=True)

    def _tell(self, problem: str) -> None:
        if problem and not self._problem:
            log.warning("the slot log cannot be written; slots go on without it", problem=problem)
        elif self._problem and not problem:
            log.info("the slot log is written again", dropped=self.dropped)
        self._problem = problem

    def _tell_dropped(self) -> None:
        if self.dropped > self._told_dropped and not self._problem:
            log.warning("lines of the slot log were dropped", dropped=self.dropped)
            self._told_dropped = self.dropped


def log_files(folder: Path) -> list[Path]:
    """Return the files of a slot log, oldest day first."""
    return sorted(path for path in folder.glob("slots-*.jsonl") if _is_log_file(path))


def day_of(path: Path) -> date:
    """Return the day, in UTC, whose lines a file has."""
    return date.fromisoformat(path.stem.removeprefix("slots-"))


def read_log(
    folder: Path, *, slot: str | None = None, day: date | None = None, tail: int = 50
) -> list[LogLine]:
    """Return the latest lines, oldest first: of one slot or all, of one day or all that are kept.

    Lines that cannot be read, as the last one of a process that was killed, are left out.
    """
    wanted = max(0, min(tail, MAX_TAIL))
    found: deque[LogLine] = deque()
    for path in reversed(log_files(folder)):
        if len(found) >= wanted:
            break
        if day is None or day_of(path) == day:
            lines = (line for line in _lines(path) if slot is None or line.slot == slot)
            found.extendleft(reversed(deque(lines, maxlen=wanted - len(found))))
    return list(found)


def latest_lines(
    folder: Path, slot: str, most: int, *, most_bytes: int = MAX_LOOKED_BYTES
) -> list[LogLine]:
    """Return the latest lines of a slot, oldest first, looking at the ends of files only.

    What lies further back than `most_bytes` is left out: `read_log` reads it all.
    """
    found: list[LogLine] = []
    left = most_bytes
    for path in reversed(log_files(folder)):
        if len(found) >= most or left <= 0:
            break
        content = _end_of(path, left)
        left -= len(content)
        found[:0] = [line for line in _decoded(content.splitlines()) if line.slot == slot]
    return found[max(0, len(found) - most) :]


def line_text(line: LogLine) -> str:
    """Return what a line tells beside its time, its slot and its kind, in one line."""
    took = "" if line.duration_ms is None else f"in {line.duration_ms:.0f} ms"
    status = "" if line.status is None else str(line.status)
    match line.phase:
        case "request":
            parts = [line.method or "", line.url or "", line.request_body or ""]
        case "response":
            parts = [status, took, line.response_body or ""]
        case "error":
            parts = [status, line.error or "", took]
        case _:
            parts = [f"{name}={_value(value)}" for name, value in (line.details or {}).items()]
    text = " ".join(" ".join(part for part in parts if part).split())
    return text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]}…"


def _value(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _end_of(path: Path, most_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            return file.read(most_bytes)
    except FileNotFoundError:
        # Its days are over, and it was removed meanwhile.
        return b""


def _lines(path: Path) -> Iterator[LogLine]:
    with path.open("rb") as file:
        yield from _decoded(file)


def _decoded(lines: Iterable[bytes]) -> Iterator[LogLine]:
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=LogLine)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue


def _is_log_file(path: Path) -> bool:
    try:
        day_of(path)
    except ValueError:
        return False
    return True


def _day(moment: float) -> date:
    return datetime.fromtimestamp(moment, UTC).date()


def _timestamp(moment: float) -> str:
    at = datetime.fromtimestamp(moment, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_BODY_CHARS else f"{text[:MAX_BODY_CHARS]}…"


# What is told of slots: lines for people in the log of the service, events in the log of slots.
#
# Rule: each thing that happens is told once, and a line that asks for something to be done says
# what.

_FAR = "a time in the far future"
_NO_KEY = QuotaFailureKind.NO_KEY.value
_THROTTLED = QuotaFailureKind.THROTTLED.value


def _of(name: str) -> FilteringBoundLogger:
    """Return what tells of one slot; its lines have the slot as a field beside the words."""
    bound: FilteringBoundLogger = log.bind(slot=name)
    return bound


def gone(name: str) -> None:
    """Tell that a slot left the settings."""
    _of(name).info(f"slot {name} is not configured any more")


def started(trail: SlotTrail, name: str, loop: str) -> None:
    """Tell that a loop has started."""
    _of(name).info(f"slot {name} {loop} started")
    trail.event(f"{_dashed(loop)}.started")


def still_disabled(name: str, row: SlotRow) -> None:
    """Tell at a start that a slot was disabled before, and stays so."""
    if row.schedule.slot_auto_disabled:
        reason = row.schedule.disabled_reason
        _of(name).warning(f"slot {name} is still disabled: {reason}; {_advice(name)}")


def from_nothing(trail: SlotTrail, name: str, problem: str) -> None:
    """Tell that what was kept of a slot could not be read, and is gone."""
    line = f"slot {name} starts from nothing: what was kept of it could not be read"
    _of(name).error(line, problem=problem)
    trail.event("slot-from-nothing")


def config_changed(trail: SlotTrail, name: str, loop: str) -> None:
    """Tell that a loop goes by another configuration."""
    _of(name).info(f"slot {name} {loop} detected config change")
    trail.event(f"{_dashed(loop)}.config-changed")


def store_away(name: str, loop: str, pulse: Pulse, problem: str) -> None:
    """Tell once that a loop cannot ask the store."""
    if not pulse.problem.startswith("the store"):
        line = f"slot {name} {loop} cannot reach the store; nothing is sent until it can"
        _of(name).warning(line, problem=problem)
    pulse.problem = "the store is unavailable"


def went_on(name: str, loop: str, pulse: Pulse) -> None:
    """Tell that a loop does its work, if it was known that it did not."""
    if pulse.problem:
        _of(name).info(f"slot {name} {loop} goes on")
        pulse.problem = ""


def condition_met(trail: SlotTrail, name: str, trigger: WakeTrigger) -> None:
    """Tell that a mode calls for a wake."""
    _of(name).info(f"slot {name} wake condition met: {trigger.reason}")
    trail.event("wake-condition-met", mode=trigger.mode.value, marker=trigger.marker)


def skipped(trail: SlotTrail, name: str, trigger: WakeTrigger, row: SlotRow) -> None:
    """Tell that a wake is not needed."""
    _of(name).info(f"slot {name} wake not needed: the window is open (next_reset: {_reset(row)})")
    trail.event("wake-skipped", mode=trigger.mode.value, marker=trigger.marker)


def missed(trail: SlotTrail, config: SlotConfig, trigger: WakeTrigger) -> None:
    """Tell that a time of day is past without its wake."""
    name, minutes = config.name, max(config.wake.wake_catch_up_minutes, 1)
    _of(name).warning(f"slot {name} wake missed: {trigger.reason} had no wake within {minutes} min")
    trail.event("wake-missed", mode=trigger.mode.value, marker=trigger.marker)


def shared_wake(trail: SlotTrail, name: str, claim: WakeClaim) -> None:
    """Tell that the wake of another slot serves this one."""
    _of(name).info(
        f"slot {name} shares the wake of another slot with the same key ({claim.reason})"
    )
    trail.event("wake-shared", claim.id, cause=claim.cause, reason=claim.reason)


def unsent(trail: SlotTrail, name: str, claim: WakeClaim) -> None:
    """Tell that a wake was not sent, because it was claimed too long before."""
    waited = f"more than {claim.send_within_seconds:.0f} s passed before it could leave"
    _of(name).warning(f"slot {name} {claim.cause} wake not sent: {waited}; its retry sees to it")
    trail.event("wake-unsent", claim.id, cause=claim.cause)


def woken(trail: SlotTrail, name: str, claim: WakeClaim, done: WakeDone) -> None:
    """Tell that a wake was sent, and what came of it."""
    also = f", also for {', '.join(claim.also)}" if claim.also else ""
    if done.problem:
        _of(name).warning(f"slot {name} {claim.cause} wake failed{also}: {done.problem}")
    else:
        _of(name).info(f"slot {name} {claim.cause} wake fired{also}")
    trail.event(
        "wake-sent", claim.id, cause=claim.cause, outcome=done.outcome, also=list(claim.also)
    )
    if done.confirmation is Confirmation.CONFIRMED:
        _confirmed(trail, name, done.row, claim.id)
    if done.is_disabled:
        disabled(trail, name, done.row)


def window_closed(trail: SlotTrail, config: SlotConfig, done: WindowDone) -> None:
    """Tell what the end of a retry window calls for."""
    name, minutes = config.name, config.wake.wake_quota_retry_window_minutes
    if done.outcome is WindowEnd.RETRY_NOW:
        _of(name).warning(f"slot {name} wake not confirmed within {minutes} min: sent once more")
    elif done.outcome is WindowEnd.BACK_TO_SCHEDULE:
        _of(name).warning(f"slot {name} wake not confirmed: back to the normal schedule")
    elif done.outcome is WindowEnd.WAKES_DISABLED:
        reason = done.row.schedule.disabled_reason
        _of(name).error(f"slot {name} wakes auto-disabled: {reason}; {_advice(name)}")
    else:
        return
    trail.event("wake-window-closed", outcome=done.outcome.value)


def polled(trail: SlotTrail, config: SlotConfig, done: PollDone, *, flow_id: str) -> None:
    """Tell what came of a poll."""
    name = config.name
    if done.is_stale:
        trail.event("quota-poller.stale-answer", flow_id, outcome=done.outcome)
        return
    if done.problem:
        _failed(trail, config, done, flow_id)
    else:
        _read(name, done)
    if done.key_was_away and done.outcome != _NO_KEY:
        _of(name).info(f"slot {name} has its key again")
    if done.errors_before and not done.problem:
        _of(name).info(f"slot {name} recovered after {done.errors_before} consecutive error(s)")
        trail.event("quota-poller.recovered", flow_id, errors=done.errors_before)
    if done.confirmation is Confirmation.CONFIRMED:
        _confirmed(trail, name, done.row, flow_id)
    elif done.confirmation is Confirmation.NOT_CONFIRMED:
        errors = done.row.schedule.wake_errors
        _of(name).info(
            f"slot {name} wake not confirmed yet ({errors} reading(s) without a new reset)"
        )
        trail.event("quota-poller.wake-unconfirmed", flow_id, wake_errors=errors)


def observed(trail: SlotTrail, config: SlotConfig, done: Observed) -> None:
    """Tell what responses to real traffic said of the quota; people are told of a wake only."""
    reading = done.row.reading
    percent = None if reading is None else reading.percent_used
    trail.event("quota-observed", next_reset=_reset(done.row), percent_used=percent)
    if done.confirmation is Confirmation.CONFIRMED:
        _confirmed(trail, config.name, done.row, "")


def switched(trail: SlotTrail, name: str, *, is_on: bool) -> None:
    """Tell that somebody enabled or disabled a slot."""
    _of(name).info(f"slot {name} {'enabled' if is_on else 'disabled'} by hand")
    trail.event("slot-enabled" if is_on else "slot-disabled")


def _read(name: str, done: PollDone) -> None:
    reading = done.row.reading
    percent = None if reading is None else reading.percent_used
    used = "" if percent is None else f", {percent:.0f}% used"
    exhausted = ", exhausted" if reading is not None and reading.is_exhausted else ""
    _of(name).info(f"slot {name} quota refreshed (next_reset: {_reset(done.row)}{used}{exhausted})")


def _failed(trail: SlotTrail, config: SlotConfig, done: PollDone, flow_id: str) -> None:
    name, most = config.name, config.wake.max_consecutive_errors
    if done.outcome == _NO_KEY:
        if not done.key_was_away:
            line = f"slot {name} cannot have its key; its tasks wait and it is tried each minute"
            _of(name).error(f"{line} ({done.problem})")
    elif done.outcome == _THROTTLED:
        until = _moment(done.row.schedule.paused_until)
        _of(name).warning(f"slot {name} was asked to wait ({done.problem}): paused until {until}")
        trail.event("quota-poller.paused", flow_id, until=until)
    elif done.errors_after > done.errors_before:
        count = f"{done.errors_after}/{most} consecutive"
        _of(name).warning(f"slot {name} poll failed ({count}): {done.problem}")
    elif done.row.schedule.wake_pending:
        _of(name).warning(f"slot {name} poll failed (a wake is being confirmed): {done.problem}")
    elif not done.is_disabled:
        _of(name).warning(f"slot {name} poll failed (out of turn, not counted): {done.problem}")
    if done.backoff_minutes is not None:
        _of(name).info(f"slot {name} backing off: next poll in {done.backoff_minutes} min")
        trail.event("quota-poller.backoff", flow_id, minutes=done.backoff_minutes)
    if done.is_disabled:
        disabled(trail, name, done.row)


def disabled(trail: SlotTrail, name: str, row: SlotRow) -> None:
    """Tell that a slot sends nothing more until somebody mends it."""
    reason = row.schedule.disabled_reason
    _of(name).error(f"slot {name} auto-disabled: {reason}; {_advice(name)}")
    trail.event("slot-auto-disabled", reason=reason)


def _advice(name: str) -> str:
    return f"mend it, then change the settings or run `headgate slot resume {name}`"


def _confirmed(trail: SlotTrail, name: str, row: SlotRow, flow_id: str) -> None:
    _of(name).info(f"slot {name} wake confirmed (next_reset: {_reset(row)})")
    trail.event("quota-poller.wake-confirmed", flow_id, next_reset=_reset(row))


def _reset(row: SlotRow) -> str:
    return _moment(None if row.reading is None else row.reading.resets_at)


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return "none"
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (OverflowError, OSError, ValueError):
        return _FAR


def _dashed(loop: str) -> str:
    return loop.replace(" ", "-")
