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

from headgate.bodies.slots import LogLine, LogPhase
from headgate.provider import Answered, Exchange, Sent, Unanswered
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

    def sent(self, request: Sent) -> None:
        """Write the line of a request."""
        self._tell("request", request, request_body=request.body)

    def answered(self, answer: Answered) -> None:
        """Write the line of an answer."""
        self._tell(
            "response",
            answer,
            status=answer.status,
            response_body=answer.body,
            duration_ms=round(answer.duration_ms, 3),
        )

    def failed(self, failure: Unanswered) -> None:
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

    def _tell(self, phase: LogPhase, told: Exchange, **fields: object) -> None:
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
