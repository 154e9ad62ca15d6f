"""A run from the command line, from its file to its end: begun or resumed, shown, interrupted.

The first Ctrl-C (or SIGTERM) starts nothing new and lets running steps finish, the second stops
them, the third ends the process at once. Rule: whatever happens, the last thing said is how the run
stands and how to go on with it; a run that could not even begin leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TextIO, cast

import click
import msgspec

from headgate.cli.connection import (
    TOKEN_FILE,
    Connection,
    accepted_service,
    default_directory,
)
from headgate.cli.logs import configure_logs
from headgate.cli.main import (
    EXIT_EXHAUSTED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_UNAVAILABLE,
    forget,
    loop_factory,
    tune_interpreter,
)
from headgate.cli.run_progress import (
    CorrectedFile,
    LogStream,
    Progress,
    count_of,
    cut_off_text,
    ending_text,
    followed,
    list_command,
    print_end,
    print_json_end,
    progress_here,
    resume_command,
    show_command,
    spent_text,
    truncated_text,
)
from headgate.config import load_prices, settings_file
from headgate.config.settings import LogSettings
from headgate.core.text import printable
from headgate.errors import (
    CallerError,
    HeadgateError,
    InvalidSettingError,
    ServiceUnavailableError,
    StoreError,
)
from headgate.workflow.backend import Backend
from headgate.workflow.budgets import (
    check_resume,
    raise_command,
    rest_text,
    run_scopes,
    said_by,
    scopes_again,
    way_on,
)
from headgate.workflow.conductor import Conductor
from headgate.workflow.costs import check_prices, with_settings_prices
from headgate.workflow.local_backend import LocalBackend, in_file, local_backend
from headgate.workflow.parser import read_workflow
from headgate.workflow.report import RunReport, RunState, StepState
from headgate.workflow.revisions import OnChanged, revise, unused_changes
from headgate.workflow.run_folder import (
    JOURNAL,
    LAST,
    Run,
    create_run,
    damage,
    open_run,
    read_record,
    run_folders,
)
from headgate.workflow.run_record import RunOptions, resumed_options
from headgate.workflow.run_tasks import recorded_tasks
from headgate.workflow.step_requests import unfillable_steps
from headgate.workflow.workflow import Workflow
from headgate.workflow.yaml_document import MAX_FILE_BYTES

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from headgate.workflow.remote_backend import RemoteBackend
    from headgate.workflow.run_metrics import RunMetrics


# The file of a workflow as bytes: read once, so that what was checked is what is kept and run.


def read_source(path: Path) -> bytes:
    """Return what a file holds, or of one that is too long enough to say so."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"cannot read {path}: {reason}; name a readable file"
        raise InvalidSettingError("FILE", problem) from None


# Ctrl-C during a run: the first lets steps finish, the second stops them, the third is final.

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MOST_PATIENT = 2


class Interruptions:
    """Counts how often somebody wanted the run to end, and does what each time means.

    `interrupt` is told each of the first two, `running` says how many steps run, and `note` is
    told what happens now.
    """

    def __init__(
        self,
        *,
        interrupt: Callable[[], None],
        running: Callable[[], int],
        note: Callable[[str], None],
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._interrupt = interrupt
        self._running = running
        self._note = note
        self._leave = leave
        self.count = 0

    def __call__(self) -> None:
        """Take one more."""
        self.count += 1
        if self.count > MOST_PATIENT:
            # What runs is killed with the process, and its money counted as assumed by a resume.
            if sys.stderr is not None:
                sys.stderr.flush()
            self._leave(EXIT_INTERRUPTED)
            return
        self._interrupt()
        self._note(self._words())

    def _words(self) -> str:
        count = self._running()
        steps, them = ("1 step", "it") if count == 1 else (f"{count:,} steps", "them")
        if self.count == 1:
            return f"finishing {steps}; Ctrl-C again stops {them}"
        return f"stopping {steps}; Ctrl-C again ends at once"


@contextmanager
def terminations_raise() -> Iterator[None]:
    """Have SIGTERM raise `KeyboardInterrupt`, as SIGINT does, until a run takes signals itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interruptible(interruptions: Interruptions) -> Iterator[None]:
    """Have signals interrupt the run while the body runs, in place of ending the process."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, interruptions)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


# Standard output during a run: the end of the run alone is written there.
#
# Functions that steps call run in this process, and print. Rule: whatever they print, by any means,
# is told like progress, and never gets between the lines of the end or into its JSON.

STANDARD_OUTPUT = 1
STANDARD_ERROR = 2
LONGEST_LINE_BYTES = 64 * 1024


class LineStream(io.RawIOBase):
    """Tells what is written to it, line by line; threads may write at the same time."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell
        self._begun = b""
        self._lock = Lock()

    def writable(self) -> bool:
        """Say that it can be written to."""
        return True

    def fileno(self) -> int:
        """Return where a child process writes to that is given this stream."""
        return STANDARD_OUTPUT

    def write(self, content: ReadableBuffer, /) -> int:
        """Tell the lines that are whole; the rest of the last one is waited for."""
        data = bytes(content)
        with self._lock:
            *lines, self._begun = (self._begun + data).split(b"\n")
            if len(self._begun) > LONGEST_LINE_BYTES:
                lines, self._begun = [*lines, self._begun], b""
        for line in lines:
            self._tell(line.decode(errors="replace"))
        return len(data)

    def tell_rest(self) -> None:
        """Tell a last line that nobody has ended."""
        if self._begun:
            self.write(b"\n")


@contextmanager
def own_output(tell: Callable[[str], None]) -> Iterator[TextIO | None]:
    """Give the body what standard output was, and have `tell` hear all that goes there meanwhile.

    None stands for an output that is closed.
    """
    before = sys.stdout
    if before is None:
        yield None
        return
    told = LineStream(tell)
    sys.stdout = io.TextIOWrapper(told, encoding="utf-8", errors="replace", write_through=True)
    try:
        with _descriptor_kept(before) as output:
            yield output
    finally:
        told.tell_rest()
        sys.stdout = before


@contextmanager
def _descriptor_kept(stream: TextIO) -> Iterator[TextIO]:
    """Have writes to the descriptor go to standard error, and give another stream to its file."""
    if not _is_standard(stream):
        yield stream
        return
    stream.flush()
    kept = os.dup(STANDARD_OUTPUT)
    elsewhere = os.open(os.devnull, os.O_WRONLY)
    # Without a standard error its number may belong to any file, such as a store.
    os.dup2(elsewhere if sys.stderr is None else STANDARD_ERROR, STANDARD_OUTPUT)
    os.close(elsewhere)
    output = open(kept, "w", encoding=stream.encoding, errors=stream.errors)  # noqa: PTH123, SIM115
    try:
        yield output
    finally:
        os.dup2(kept, STANDARD_OUTPUT)
        with suppress(OSError):
            output.close()


def _is_standard(stream: TextIO) -> bool:
    try:
        return stream.fileno() == STANDARD_OUTPUT
    except (OSError, ValueError):
        return False


def discard(output: TextIO | None) -> None:
    """Have a stream that cannot be written to forget what it holds, so that it can be closed."""
    if output is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output.fileno())
        os.close(nowhere)


EXIT_CODES = {
    RunState.DONE: 0,
    RunState.FAILED: EXIT_FAILED,
    RunState.EXHAUSTED: EXIT_EXHAUSTED,
    RunState.INTERRUPTED: EXIT_INTERRUPTED,
    RunState.RUNNING: EXIT_FAILED,
    RunState.UNBOOKED: EXIT_FAILED,
}


def run_workflow(
    file: Path | None,
    options: RunOptions,
    *,
    resume: str | None,
    changed: OnChanged | None = None,
    as_json: bool,
    metrics: RunMetrics | None = None,
) -> int:
    """Begin a run of a file, or go on with one, and return the exit code of its end."""
    if file is not None and resume is None:
        run = _begun(file, options)
    else:
        run = open_run(options.data, resume or LAST)
        if file is not None and resume == LAST:
            _check_workflow_of_last(run, file, options.data)
        check_resume(run.record, options)
        options = resumed_options(run.record, options)
    with run.held(), terminations_raise():
        if resume is not None:
            options = _corrected(run, file, options, changed)
        new_limit = None if resume is None else options.micro_usd
        ending = Ending(run, options, as_json=as_json)
        try:
            if options.concurrency != run.record.concurrency:
                run.change(concurrency=options.concurrency)
            backend = _backend(run, options, sets_own_limit=new_limit is not None)
            for wrong in unfillable_steps(run.workflow, run.items):
                runs = "1 run" if wrong.runs == 1 else f"{wrong.runs:,} runs"
                line = f"warning: {runs} of {wrong.step} will fail: {wrong.error}"
                click.echo(f"headgate: {printable(line)}", err=True)
            return _run_with_progress(run, backend, ending, metrics, new_limit=new_limit)
        except KeyboardInterrupt as interruption:
            forget(interruption)
            ending.say_way_on()
            return EXIT_INTERRUPTED
        except HeadgateError as error:
            is_gone = resume is None and _has_no_tasks(run)
            if is_gone:
                shutil.rmtree(run.path, ignore_errors=True)
            if isinstance(error, InvalidSettingError):
                raise in_file(error, run.workflow) from error
            if isinstance(error, CallerError):
                raise
            has_gone = is_gone or bool(damage(run.path, run.record))
            return ending.break_off(error, is_gone=has_gone)


class Ending:
    """Writes how a run has ended to standard output."""

    def __init__(self, run: Run, options: RunOptions, *, as_json: bool) -> None:
        self._run = run
        self._as_json = as_json
        self._resume = resume_command(run.id, options.data)
        self._correct = resume_command(run.id, options.data, file=run.record.file)
        self._show = show_command(run.id, options.data)

    def write(self, report: RunReport, output: TextIO | None) -> int:
        """Write the end, and return its exit code; a reader that has gone does not change it."""
        code = EXIT_CODES[report.state]
        path, record, resume = self._run.path, self._run.record, self._resume
        try:
            if self._as_json:
                raising = raise_command(record, report, resume=resume)
                print_json_end(
                    report, path, exit_code=code, resume=resume, raising=raising, file=output
                )
                if truncated := truncated_text(report):
                    click.echo(f"headgate: {printable(truncated)}", err=True)
            else:
                way = way_on(record, report, resume=resume)
                after = CorrectedFile(record.file, self._correct)
                rest = rest_text(self._run.workflow, report)
                print_end(report, path, resume=way, corrected=after, rest=rest, file=output)
            if output is not None:
                output.flush()
        except BrokenPipeError:
            discard(output)
        except OSError as error:
            discard(output)
            self._say_unwritten(report, error)
            # What reads the output must not take a part of it for the whole.
            return code or EXIT_FAILED
        return code

    def _say_unwritten(self, report: RunReport, error: OSError) -> None:
        problem = f"standard output: {error.strerror or error}; {self._show} prints it again"
        for line in (f"headgate: {problem}", ending_text(report), f"kept in {self._run.path}"):
            click.echo(printable(line), err=True)

    def say_way_on(self) -> None:
        """Say on standard error how to go on with the run."""
        # Whoever ends a run may have gone, and its terminal with it.
        with suppress(OSError):
            click.echo(f"headgate: to go on: {self._resume}", err=True)

    def break_off(self, error: HeadgateError, *, is_gone: bool) -> int:
        """Say why a run cannot go on now, and how to if it is there; return the exit code."""
        click.echo(f"headgate: {printable(str(error))}", err=True)
        if not is_gone:
            self.say_way_on()
        return EXIT_UNAVAILABLE if isinstance(error, ServiceUnavailableError) else EXIT_FAILED


def _begun(file: Path, options: RunOptions) -> Run:
    """Read a file and make the folder of a new run of it."""
    text = read_source(file)
    workflow = with_settings_prices(read_workflow(file, text), settings_file(options.config))
    scopes = run_scopes(workflow, options, os.environ)
    if options.server is None:
        check_prices(workflow, scopes)
    return create_run(
        options,
        source=file,
        text=text,
        workflow=workflow,
        now=time.time(),
        scopes=scopes,
    )


def _check_workflow_of_last(run: Run, file: Path, data: Path) -> None:
    """Refuse a file that is no correction of the last run's, but another workflow.

    Such a file has another name, and runs of its own or another folder.
    """
    of_run = {Path(one).resolve() for one in (run.record.source, run.record.file)}
    if file.resolve() in of_run:
        return
    name = read_workflow(file, read_source(file)).name
    if name == run.record.workflow:
        return
    own = _last_run_of(file, data)
    if own is None and file.absolute().parent == run.workflow.folder:
        return
    problem = f"the last run is of {run.record.workflow!r} ({run.record.file}), not {name!r}"
    advice = f"list the runs with: {list_command(data)}"
    if own is not None:
        advice = f"the last of {name!r}: {resume_command(own, data, file=str(file))}"
    raise InvalidSettingError("--resume", f"{problem}; {advice}")


def _last_run_of(file: Path, data: Path) -> str | None:
    """Return the id of the newest run that was begun from a file."""
    for path in run_folders(data):
        with suppress(StoreError):
            if Path(read_record(path).source).resolve() == file.resolve():
                return path.name
    return None


def _corrected(
    run: Run, file: Path | None, options: RunOptions, changed: OnChanged | None
) -> RunOptions:
    """Have a run go by a corrected file, if there is one; say which changes it does not use."""

    def check(workflow: Workflow) -> None:
        if options.server is None:
            priced = with_settings_prices(workflow, settings_file(options.config))
            check_prices(priced, run.record.scopes)

    limit = run.workflow.micro_usd
    if file is not None:
        revise(run, file, read_source(file), check=check, changed=changed, now=time.time())
    if options.micro_usd is None and run.workflow.micro_usd != limit:
        options = msgspec.structs.replace(options, micro_usd=run.workflow.micro_usd)
    command = resume_command(run.id, options.data, file=run.record.file)
    for path in unused_changes(run):
        way = f"the run goes on without the change; to use the change: {command}"
        if file is not None:
            way = "it has another number of items now, so the run keeps those that it began with"
        click.echo(
            f"headgate: {printable(f'{path} changed after this run began; {way}')}", err=True
        )
    return options


def _backend(run: Run, options: RunOptions, *, sets_own_limit: bool) -> Backend:
    path = settings_file(options.config)
    if path is not None and run.record.config is None and load_prices(path):
        # A resume finds the same prices, wherever it is started.
        run.change(config=str(path.absolute()))
    run.workflow = with_settings_prices(run.workflow, path)
    if options.server is not None:
        return service_backend(run, options, sets_own_limit=sets_own_limit)
    return local_backend(run, run.workflow, options, os.environ)


def _run_with_progress(
    run: Run,
    backend: Backend,
    ending: Ending,
    metrics: RunMetrics | None,
    *,
    new_limit: int | None,
) -> int:
    progress = progress_here()
    try:
        configure_logs(LogSettings(level="warning", format="text"), stream=LogStream(progress))
        with (
            own_output(progress.tell) as output,
            _warnings_as_progress(progress),
            asyncio.Runner(loop_factory=loop_factory()) as runner,
        ):
            tune_interpreter()
            write = partial(ending.write, output=output)
            return runner.run(
                _conducted(run, backend, progress, ending, write, metrics, new_limit=new_limit)
            )
    finally:
        progress.close()


async def _conducted(
    run: Run,
    backend: Backend,
    progress: Progress,
    ending: Ending,
    write: Callable[[RunReport], int],
    metrics: RunMetrics | None,
    *,
    new_limit: int | None,
) -> int:
    def begin() -> None:
        report = conductor.report()
        progress.begin(report, run.path)
        if new_limit is not None and (line := spent_text(report, new_limit)):
            progress.tell(line)
        if isinstance(backend, LocalBackend) and backend.cut_off:
            progress.tell(cut_off_text(backend.cut_off, backend.cut_off_micro_usd))
        if metrics is not None and metrics.address is not None:
            progress.tell(f"metrics at {metrics.address}")

    conductor = Conductor(run, backend, clock=time.time, ended=progress.ended, begun=begin)

    def leave(code: int) -> None:
        progress.close()
        ending.say_way_on()
        os._exit(code)

    interruptions = Interruptions(
        interrupt=conductor.interrupt,
        running=lambda: count_of(conductor.report(), StepState.RUNNING),
        note=progress.note,
        leave=leave,
    )
    service = None if isinstance(backend, LocalBackend) else cast("RemoteBackend", backend)
    with interruptible(interruptions):
        async with (
            followed(progress, conductor.report, trouble=lambda: backend.trouble),
            _shown_to_prometheus(metrics, conductor.report, progress),
        ):
            report = await conductor.run()
        code = write(report)
        if isinstance(backend, LocalBackend) and backend.has_left_behind:
            # The event loop would wait for it at its end, however long it takes.
            click.echo(
                "headgate: some work did not stop in time, and ends with this process", err=True
            )
            os._exit(code)
    if service is not None and service.remains:
        click.echo(f"headgate: {service.remains}", err=True)
    return code


@asynccontextmanager
async def _shown_to_prometheus(
    metrics: RunMetrics | None, report: Callable[[], RunReport], progress: Progress
) -> AsyncIterator[None]:
    if metrics is None:
        yield
        return
    metrics.tell = progress.tell
    async with metrics.followed(report):
        yield


def _has_no_tasks(run: Run) -> bool:
    """Tell whether nothing of a run was ever submitted, so that it might as well not be there."""
    if run.record.has_begun:
        return False
    try:
        with recorded_tasks(run.path, run.id) as recorded:
            return next(recorded.tasks(), None) is None
    except HeadgateError:
        # What cannot be read may hold something.
        return False


@contextmanager
def _warnings_as_progress(progress: Progress) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_rest, **_more: progress.tell(
            f"headgate: warning: {message}"
        )
        yield


# Runs on a service: its address and the token for it, from where all commands have them.


def found_address(options: RunOptions) -> tuple[str, str | None]:
    """Return the whole address of the service that options name, and the token for it."""
    # A directory that was named may be one for runs alone, which has no token in it.
    is_named = options.data != default_directory()
    data = options.data if is_named and (options.data / TOKEN_FILE).exists() else None
    return accepted_service(Connection(options.server, options.token, data))


def service_backend(run: Run, options: RunOptions, *, sets_own_limit: bool) -> RemoteBackend:
    """Return what has a service carry out a run; what no service runs is refused at once."""
    # Most runs are not for a service: they do without its client.
    from headgate.workflow.remote_backend import RemoteBackend  # noqa: PLC0415
    from headgate.workflow.remote_tasks import check_for_service  # noqa: PLC0415

    check_for_service(run.workflow, run.workflow.file)
    url, token = found_address(options)
    scopes = scopes_again(run.record, options)
    return RemoteBackend(
        url,
        run_id=run.id,
        workflow=run.workflow,
        scopes=scopes,
        journal=run.path / JOURNAL,
        token=token,
        project_id=options.project,
        sets_own_limit=sets_own_limit,
        said_by=said_by(scopes, options),
    )
