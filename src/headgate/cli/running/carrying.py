"""A run from the command line, from its file to its end: begun or resumed, shown, interrupted.

The first Ctrl-C (or SIGTERM) starts nothing new and lets running steps finish, the second stops
them, the third ends the process at once. Rule: whatever happens, the last thing said is how the run
stands and how to go on with it; a run that could not even begin leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import click

from headgate.cli.event_loop import loop_factory, tune_interpreter
from headgate.cli.exit_codes import EXIT_EXHAUSTED, EXIT_FAILED, EXIT_INTERRUPTED
from headgate.cli.interruption import forget
from headgate.cli.logs import configure_logs
from headgate.cli.running.output import discard, own_output
from headgate.cli.running.progress import LogStream, Progress, followed, progress_here
from headgate.cli.running.signals import Interruptions, interruptible, terminations_raise
from headgate.cli.running.table import print_end, print_json_end, resume_command, show_command
from headgate.cli.running.words import count_of, ending_text
from headgate.cli.running.workflow_file import read_source
from headgate.core.texts.printable import printable
from headgate.errors import CallerError, HeadgateError, InvalidSettingError
from headgate.runs.backend import Backend
from headgate.runs.budgets import run_scopes
from headgate.runs.checking import in_file
from headgate.runs.conductor import Conductor
from headgate.runs.kept.files import damage
from headgate.runs.kept.folder import LAST, Run, create_run, open_run
from headgate.runs.kept.record import resumed_options
from headgate.runs.local.backend import LocalBackend, local_backend
from headgate.runs.raising import raise_command, way_on
from headgate.runs.report import RunReport, RunState, StepState
from headgate.runs.resuming import check_resume
from headgate.runs.viewing.tasks import recorded_tasks
from headgate.settings.sections import LogSettings
from headgate.workflow.costs import check_prices
from headgate.workflow.reading import read_workflow

if TYPE_CHECKING:
    from headgate.runs.options import RunOptions
    from headgate.runs.remote.backend import ServerBackend

EXIT_CODES = {
    RunState.DONE: 0,
    RunState.FAILED: EXIT_FAILED,
    RunState.EXHAUSTED: EXIT_EXHAUSTED,
    RunState.INTERRUPTED: EXIT_INTERRUPTED,
    RunState.RUNNING: EXIT_FAILED,
    RunState.UNBOOKED: EXIT_FAILED,
}


def carry_out(file: Path | None, options: RunOptions, *, resume: str | None, as_json: bool) -> int:
    """Begin a run of a file, or go on with one, and return the exit code of its end."""
    sets_own_limit = file is None and options.micro_usd is not None
    run = _begun(file, options) if file is not None else open_run(options.data, resume or LAST)
    if file is None:
        check_resume(run.record, options)
        options = resumed_options(run.record, options)
    ending = Ending(run, options, as_json=as_json)
    with run.held(), terminations_raise():
        try:
            if options.concurrency != run.record.concurrency:
                run.change(concurrency=options.concurrency)
            backend = _backend(run, options, sets_own_limit=sets_own_limit)
            return _carried_out(run, backend, ending)
        except KeyboardInterrupt as interruption:
            forget(interruption)
            ending.say_way_on()
            return EXIT_INTERRUPTED
        except HeadgateError as error:
            is_gone = file is not None and _has_no_tasks(run)
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
            else:
                way = way_on(record, report, resume=resume)
                print_end(report, path, resume=way, file=output)
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
        # Not 3, as for other commands: here it says that a budget is used up.
        return EXIT_FAILED


def _begun(file: Path, options: RunOptions) -> Run:
    """Read a file and make the folder of a new run of it."""
    text = read_source(file)
    workflow = read_workflow(file, text)
    check_prices(workflow)
    return create_run(
        options,
        source=file,
        text=text,
        workflow=workflow,
        now=time.time(),
        scopes=run_scopes(workflow, options, os.environ),
    )


def _backend(run: Run, options: RunOptions, *, sets_own_limit: bool) -> Backend:
    if options.server is not None:
        # Most runs are none of a service, and need none of this.
        from headgate.cli.running.service import service_backend  # noqa: PLC0415

        return service_backend(run, options, sets_own_limit=sets_own_limit)
    return local_backend(run, run.workflow, options, os.environ)


def _carried_out(run: Run, backend: Backend, ending: Ending) -> int:
    progress = progress_here()
    try:
        configure_logs(LogSettings(level="warning", format="text"), stream=LogStream(progress))
        with (
            own_output(progress.tell) as output,
            _warnings_told(progress),
            asyncio.Runner(loop_factory=loop_factory()) as runner,
        ):
            tune_interpreter()
            write = partial(ending.write, output=output)
            return runner.run(_conducted(run, backend, progress, ending, write))
    finally:
        progress.close()


async def _conducted(
    run: Run,
    backend: Backend,
    progress: Progress,
    ending: Ending,
    write: Callable[[RunReport], int],
) -> int:
    conductor = Conductor(
        run,
        backend,
        clock=time.time,
        ended=progress.ended,
        begun=lambda: progress.begin(conductor.report(), run.path),
    )

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
    service = None if isinstance(backend, LocalBackend) else cast("ServerBackend", backend)
    with interruptible(interruptions):
        async with followed(progress, conductor.report, trouble=lambda: backend.trouble):
            report = await conductor.carry_out()
        code = write(report)
        if isinstance(backend, LocalBackend) and backend.has_left_behind:
            # The event loop would wait for it at its end, however long it takes.
            click.echo("headgate: work that would not stop ends with the process", err=True)
            os._exit(code)
    if service is not None and service.remains:
        click.echo(f"headgate: {service.remains}", err=True)
    return code


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
def _warnings_told(progress: Progress) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_rest, **_more: progress.tell(
            f"headgate: warning: {message}"
        )
        yield
