"""The folder of a run, `DATA/runs/<RUN>`: made whole or not at all, and one process drives it.

`run.json` is the record, `workflow.yaml` the file as it was, `items-<step>.jsonl` a copy of each
file of items: a resume runs what was begun, whatever has happened to the originals. A corrected
file that a resume took lies in `revision-<n>` with its items. The store or the journal of the run
lies beside them. What was changed or lost here is refused.

Rule: whatever is written here is on disk before it counts, and only its owner can read it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from headgate.errors import DirectoryInUseError, InvalidSettingError, StoreError
from headgate.storage.data_lock import hold_directory, is_held
from headgate.workflow.backend import StepTask, TaskState
from headgate.workflow.expansion import Expansion, ItemSource, load_items
from headgate.workflow.parser import read_workflow
from headgate.workflow.report import RunReport, RunState
from headgate.workflow.run_record import (
    FORMAT,
    NO_GENERATIONS,
    RunOptions,
    RunRecord,
    RunScope,
    Tracker,
    new_run_id,
    recorded,
)
from headgate.workflow.workflow import Workflow

# The files of a run that a resume goes by: whether they are there, and are what they were.
#
# Runs of steps are known by their numbers. If items or steps are changed in between, the numbers
# are those of others, and the results with them; if the store is gone, so is what was done and
# spent. Rule: what cannot be trusted is refused, and nothing is made up in its place.

WORKFLOW = "workflow.yaml"
STORE = "headgate.db"
JOURNAL = "journal.jsonl"


def digests_of(paths: Iterable[Path]) -> dict[str, str]:
    """Return what tells these files from any others, by their names."""
    return {path.name: _digest(path) for path in sorted(paths)}


def damage(path: Path, record: RunRecord) -> str:
    """Say in one line what of the folder of a run is not as the run left it; empty if all is."""
    anew = f"begin anew with headgate run {shlex.quote(record.file)}"
    if record.has_begun and not any((path / name).exists() for name in (STORE, JOURNAL)):
        name = STORE if record.server is None else JOURNAL
        return f"{path / name} is gone; what the run did and spent is not known; {anew}"
    for name, digest in record.digests.items():
        try:
            is_same = _digest(path / name) == digest
        except OSError as error:
            why = f"cannot be read: {error.strerror}; the run cannot be resumed"
            return f"{path / name} {why}; put it back, or {anew}"
        if not is_same:
            return f"{path / name} was changed since the run began; put it back, or {anew}"
    return ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


RUNS = "runs"
RECORD = "run.json"
LAST = "last"

_UNFINISHED = ".unfinished-"
_FORGOTTEN_SECONDS = 3_600.0
_ONLY_THE_OWNER = 0o600
_ONLY_THE_OWNER_ENTERS = 0o700
_TRIES = 20
_records = msgspec.json.Decoder(RunRecord)


class Run:
    """One run: its folder, its record, and the workflow with its items as they were begun."""

    def __init__(
        self, path: Path, record: RunRecord, workflow: Workflow, items: Mapping[str, ItemSource]
    ) -> None:
        self.path = path
        self.record = record
        self.workflow = workflow
        self.items = items
        self.lock: int | None = None
        """The open file that is the lock, while it is held: for a process that writes for us."""

    @property
    def id(self) -> str:
        """The id of the run."""
        return self.record.id

    @property
    def files(self) -> Path:
        """The folder with the copies of the workflow file and its items that the run goes by."""
        return self.path / self.record.files

    def is_void(self, step_id: str, task: StepTask) -> bool:
        """Tell whether a corrected file made a task of a step void: it begins anew."""
        first = self.record.first_generations.get(step_id, NO_GENERATIONS)
        counts_from = first.done if task.state is TaskState.DONE else first.unfinished
        return task.generation < counts_from

    def next_generation(self, step_id: str, task: StepTask | None) -> int:
        """Return the generation of the next task of a run of a step, after its latest one."""
        first = self.record.first_generations.get(step_id, NO_GENERATIONS).unfinished
        return first if task is None else max(first, task.generation + 1)

    def change(self, **fields: Any) -> None:  # noqa: ANN401 - the fields of the record
        """Change fields of the record; they are on disk when this returns."""
        record = msgspec.structs.replace(self.record, **fields)
        with kept_in(self.path):
            replace_file(self.path / RECORD, _written(record))
        self.record = record

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the only process that drives the run, while the body runs; it may be held within."""
        if self.lock is not None:
            yield
            return
        with _held(self.path, self.id) as lock:
            self.lock = lock
            try:
                yield
            finally:
                self.lock = None


def create_run(
    options: RunOptions,
    *,
    source: Path,
    text: bytes,
    workflow: Workflow,
    now: float,
    scopes: tuple[RunScope, ...] = (),
    tracker: Tracker = "local",
    ledger: str = "",
) -> Run:
    """Make the folder of a new run: at no moment is there one that is not whole.

    `ledger` is the address of a ledger outside the run, without its password.
    """
    record = RunRecord(
        id="",
        workflow=workflow.name,
        created_at=now,
        source=str(source.absolute()),
        folder=str(workflow.folder),
        scopes=scopes,
        tracker=tracker,
        ledger=ledger,
    )
    runs = options.data / RUNS
    with kept_in(runs):
        runs.mkdir(mode=_ONLY_THE_OWNER_ENTERS, parents=True, exist_ok=True)
        _clear(runs)
        return _made(runs, recorded(record, options), text, workflow)


def open_run(data: Path, name: str) -> Run:
    """Open a run by its id, by a beginning that no other has, or as `last`.

    One of which something was lost or changed raises `StoreError`.
    """
    path = find_run(data, name)
    record = read_record(path)
    if problem := damage(path, record):
        raise StoreError(problem)
    try:
        text = (path / record.files / WORKFLOW).read_bytes()
    except OSError as error:
        problem = f"{path / WORKFLOW} cannot be read: {error.strerror}; the run cannot be resumed"
        raise StoreError(problem) from None
    workflow = read_workflow(Path(record.file), text, name=record.workflow)
    return Run(path, record, workflow, load_items(workflow, copies=path / record.files))


def find_run(data: Path, name: str) -> Path:
    """Return the folder of a run by its id, a beginning of it, or `last`."""
    paths = run_folders(data)
    if name == LAST and paths:
        return paths[0]
    found = [path for path in paths if path.name == name]
    found = found or [path for path in paths if name and path.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if not found:
        problem = f"there is no run {name[:64]!r} in {data}; `headgate runs` lists the runs"
        raise InvalidSettingError("RUN", problem)
    some = ", ".join(path.name for path in found[:3])
    problem = f"{name[:64]!r} begins {len(found)} runs ({some}, …); give more of the id"
    raise InvalidSettingError("RUN", problem)


def run_folders(data: Path) -> list[Path]:
    """Return the folders of all runs, the newest first."""
    try:
        found = [path for path in (data / RUNS).iterdir() if not path.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        problem = f"{data / RUNS} cannot be read: {error.strerror}"
        raise StoreError(problem) from None
    newest_first = sorted(found, key=_begun, reverse=True)
    return [path for path in newest_first if (path / RECORD).exists()]


def _begun(path: Path) -> tuple[str, int]:
    """Return what sorts runs by their begin: ids have the second, and a file that never changes."""
    try:
        within = (path / WORKFLOW).stat().st_mtime_ns
    except OSError:
        within = 0
    return path.name.rpartition("-")[0], within


def read_record(path: Path) -> RunRecord:
    """Read the record of a run from its folder."""
    try:
        record = _records.decode((path / RECORD).read_bytes())
    except OSError as error:
        problem = f"{path / RECORD} cannot be read: {error.strerror}"
        raise StoreError(problem) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = f"{path / RECORD} is damaged: {error}"
        raise StoreError(problem) from None
    if record.format > FORMAT:
        problem = f"{path / RECORD} was written by a newer headgate; install that one"
        raise StoreError(problem)
    return record


def is_driven(path: Path) -> bool:
    """Tell whether a process drives the run in this folder now."""
    return is_held(path)


def _made(runs: Path, record: RunRecord, text: bytes, workflow: Workflow) -> Run:
    unfinished = runs / f"{_UNFINISHED}{os.getpid()}-{time.monotonic_ns():x}"
    unfinished.mkdir(mode=_ONLY_THE_OWNER_ENTERS)
    try:
        write_file(unfinished / WORKFLOW, text)
        items = load_items(workflow, copies=unfinished)
        for copy in unfinished.glob("items-*"):
            copy.chmod(_ONLY_THE_OWNER)
        digests = digests_of(unfinished.iterdir())
        total = Expansion(workflow, items).total
        record = msgspec.structs.replace(record, total=total, digests=digests)
        path, record = _named(runs, unfinished, record)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return Run(path, record, workflow, items)


def _named(runs: Path, unfinished: Path, record: RunRecord) -> tuple[Path, RunRecord]:
    for _ in range(_TRIES):
        record = msgspec.structs.replace(record, id=new_run_id(record.created_at))
        replace_file(unfinished / RECORD, _written(record))
        try:
            unfinished.rename(runs / record.id)
        except OSError as error:
            # A folder that is not empty is never replaced by renaming another to it.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            sync_directory(runs)
            return runs / record.id, record
    problem = f"{runs} has runs of all ids that were drawn; try again"
    raise StoreError(problem)


def _clear(runs: Path) -> None:
    """Remove what processes left that ended while they made a folder."""
    for path in runs.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _held(path: Path, run_id: str) -> Iterator[int]:
    try:
        with hold_directory(path) as lock:
            yield lock
    except DirectoryInUseError as error:
        if error.directory != str(path):
            raise
        process = "another process" if error.pid is None else f"process {error.pid}"
        problem = f"run {run_id} is under way in {process}; wait for it, or stop it first"
        raise StoreError(problem) from None


@contextmanager
def kept_in(path: Path) -> Iterator[None]:
    """Say where a run is kept if that fails while the body runs."""
    try:
        yield
    except OSError as error:
        problem = f"the run cannot be kept in {path}: {error.strerror or error}"
        problem += "; name another directory with --data"
        raise StoreError(problem) from error


def _written(record: RunRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def write_file(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read; it is on disk when this returns."""
    with _new_file(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step: it has all of the new content, or all of the old."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    write_file(fresh, content)
    fresh.replace(path)
    sync_directory(path.parent)


def _new_file(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _ONLY_THE_OWNER), "wb")


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on disk before this returns."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# What the record says of a run while it is under way, and how it stood when that was over.
#
# Rule: a process that was refused, or interrupted before it knew what is there, changes nothing.
# Only the time counts in which a process carried the run, not that between two of them.

_BEGINS: dict[str, Any] = {
    "state": RunState.RUNNING,
    "ended": 0,
    "done": None,
    "ended_at": None,
    "exhausted_by": None,
    "spent_micro_usd": None,
    "unbooked_micro_usd": 0,
    "money": (),
}
"""What the record says of a run that is under way; the rest is known when it has ended."""


class RecordWriter:
    """Keeps in the record how one run stands."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before: dict[str, Any] = {}

    def begin(self, *, now: float, left_at: Callable[[], float]) -> None:
        """Say that the run is under way; `left_at` tells when a process left it that was killed."""
        record = self._run.record
        was_killed = record.life_began_at is not None
        carried = record.seconds_until(left_at()) if was_killed else record.carried_seconds
        self._before = {name: getattr(record, name) for name in _BEGINS}
        self._before |= {"carried_seconds": carried, "life_began_at": None}
        self._run.change(**_BEGINS, carried_seconds=carried, life_began_at=now)

    def take_back(self) -> None:
        """Say again what was said before the begin."""
        self._run.change(**self._before)

    def end(self, report: RunReport, *, now: float) -> None:
        """Say how the run stood when its process left it."""
        self._run.change(
            state=report.state,
            carried_seconds=self._run.record.seconds_until(now),
            life_began_at=None,
            ended_at=now,
            exhausted_by=report.exhausted_by,
            ended=report.ended,
            done=report.done,
            spent_micro_usd=sum(step.micro_usd for step in report.steps),
            unbooked_micro_usd=report.unbooked_micro_usd,
            money=report.money,
        )
