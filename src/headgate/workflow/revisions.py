"""A run that goes on with a corrected file: which of its work counts, and which begins anew.

What is not done goes by the new file, and by the files of items that have as many items as before.
What is done stays done if the file left it as it was: its
work, its items, its condition and what it depends on, and the same of all that it depends on. Where
the file changed one of these, somebody has to say whether it is kept or runs again.

Rule: a run is known by numbers, so steps that have results keep their numbers. The copy of the file
and its items is whole before the record names it, and a file that is refused leaves nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import starmap
from pathlib import Path
from typing import Literal

import msgspec

from headgate.errors import WorkflowError
from headgate.workflow.backend import StepTask, TaskState, keep_newest
from headgate.workflow.expansion import (
    Expansion,
    ItemSource,
    copy_of_items,
    load_items,
    normal_lines,
    ordered,
)
from headgate.workflow.parser import read_workflow
from headgate.workflow.run_folder import (
    WORKFLOW,
    Run,
    digests_of,
    kept_in,
    sync_directory,
    write_file,
)
from headgate.workflow.run_record import FORMAT, FirstGenerations, Revision
from headgate.workflow.run_tasks import recorded_tasks
from headgate.workflow.step_requests import fields_read
from headgate.workflow.workflow import FileItems, Step, StepItems, Workflow

OnChanged = Literal["keep", "rerun"]
"""What becomes of finished runs of steps that the new file changed."""

MAX_REVISIONS = 1_000
_NAMED = 5


def revise(
    run: Run,
    source: Path,
    text: bytes,
    *,
    check: Callable[[Workflow], None],
    changed: OnChanged | None,
    now: float,
) -> None:
    """Have a run go by a corrected file from now on, or raise `WorkflowError` and change nothing.

    `check` raises for what the caller refuses. The run must be held by this process.
    """
    renewed = frozenset(_renewed_items(run))
    is_same = str(source.absolute()) == run.record.file and text == _text_of(run)
    if is_same and not renewed:
        check(run.workflow)
        return
    workflow = read_workflow(source, text, name=run.record.workflow)
    check(workflow)
    _check_config(run, workflow)
    with _new_files(run, workflow, text, renewed) as (folder, items):
        done_work = _DoneWork(run)
        done_work.check_numbers(workflow, items)
        steps = _changed_steps(run.workflow, workflow, renewed)
        _check_outputs(run, workflow, done_work)
        after = _with_descendants(workflow, steps)
        done = {name: done_work.done[name] for name in after if name in done_work.done}
        if done and changed is None:
            raise _undecided(workflow, done)
        rerun = after if done and changed == "rerun" else ()
        final = run.path / f"revision-{len(run.record.revisions) + 1}"
        shutil.rmtree(final, ignore_errors=True)
        sync_directory(folder)
        folder.rename(final)
    digests = digests_of(final.iterdir())
    run.change(
        format=FORMAT,
        revisions=(
            *run.record.revisions,
            Revision(
                at=now,
                source=str(source.absolute()),
                files=final.name,
                changed=tuple(steps),
                rerun=tuple(rerun),
            ),
        ),
        first_generations=done_work.first_generations(steps, rerun),
        digests={
            **run.record.digests,
            **{f"{final.name}/{name}": one for name, one in digests.items()},
        },
        total=Expansion(workflow, items).total,
    )
    run.workflow, run.items = workflow, load_items(workflow, copies=final)


def unused_changes(run: Run) -> Iterator[Path]:
    """Give the files that are not any more what the run goes by: the workflow's, then the items'.

    One that is gone is not one that changed.
    """
    file = Path(run.record.file)
    with suppress(OSError):
        if file.read_bytes() != _text_of(run):
            yield file
    yield from changed_items(run)


def changed_items(run: Run) -> Iterator[Path]:
    """Give the files of items that are not any more what the run has copies of."""
    for path, copy in _copies(run.workflow, run.files).items():
        with suppress(OSError, WorkflowError):
            if path.stat().st_mtime_ns > copy.stat().st_mtime_ns and not _is_same(path, copy):
                yield path


def _renewed_items(run: Run) -> Iterator[Path]:
    """Give the changed files of items that a run can use: runs are known by their numbers."""
    copies = _copies(run.workflow, run.files)
    for path in changed_items(run):
        with copies[path].open("rb") as copy:
            if sum(1 for _ in normal_lines(path)) == sum(1 for _ in copy):
                yield path


def _is_same(path: Path, copy: Path) -> bool:
    digest = hashlib.sha256()
    for line in normal_lines(path):
        digest.update(line)
    with copy.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest() == digest.digest()


def _text_of(run: Run) -> bytes:
    return (run.files / WORKFLOW).read_bytes()


def _copies(workflow: Workflow, folder: Path) -> dict[Path, Path]:
    """Return the copy of each file of items, which is named after the first step that has it."""
    found: dict[Path, Path] = {}
    for step in workflow.steps:
        if isinstance(step.foreach, FileItems):
            found.setdefault(step.foreach.path, copy_of_items(folder, step.id))
    return found


@contextmanager
def _new_files(
    run: Run, workflow: Workflow, text: bytes, renewed: Collection[Path]
) -> Iterator[tuple[Path, Mapping[str, ItemSource]]]:
    """Make a folder with the new file and its items; those of files that stay are kept."""
    folder = run.path / "revision.new"
    with kept_in(run.path):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            write_file(folder / WORKFLOW, text)
            before = _copies(run.workflow, run.files)
            for path, copy in _copies(workflow, folder).items():
                if path in before and path not in renewed:
                    _link(before[path], copy)
            yield folder, load_items(workflow, copies=folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _link(before: Path, copy: Path) -> None:
    try:
        os.link(before, copy)
    except OSError:
        # Not every file system has links.
        shutil.copy2(before, copy)


class _DoneWork:
    """What a run has done so far, by the steps of the file that it went by."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._expansion = Expansion(run.workflow, run.items)
        self._last_generations: dict[str, int] = {}
        latest: dict[int, StepTask] = {}
        with recorded_tasks(run.path, run.id) as recorded:
            for task in recorded.tasks():
                step_id = self._step_of(task)
                last = self._last_generations.get(step_id, 0)
                self._last_generations[step_id] = max(last, task.generation)
                keep_newest(latest, task)
        self.done: Counter[str] = Counter(
            self._step_of(task) for task in latest.values() if self._is_done(task)
        )
        """How many runs of which steps are done, and count."""

    def check_numbers(self, workflow: Workflow, items: Mapping[str, ItemSource]) -> None:
        """Refuse a file in which a step that has tasks has other numbers than before."""
        expansion = Expansion(workflow, items)
        positions = {step.id: position for position, step in enumerate(workflow.steps)}
        for step in self._run.workflow.steps:
            if step.id not in self._last_generations:
                continue
            if step.id not in positions:
                problem = f"the run has results of {step.id}, and no step has that id; put it back"
                raise WorkflowError(workflow.file, problem, key="steps")
            before, now = self._expansion.runs_of(step.id), expansion.runs_of(step.id)
            if before == now:
                continue
            if len(before) != len(now):
                problem = f"has {len(now):,} items, and the run began with {len(before):,}"
                advice = "put them back, or begin a new run"
            else:
                problem = f"{step.id} has results, and a step before it came, went or grew"
                advice = "keep the order of the steps; new steps go to the end"
            raise _wrong(workflow, positions[step.id], f"{problem}; {advice}")

    def first_generations(
        self, changed: Iterable[str], rerun: Iterable[str]
    ) -> dict[str, FirstGenerations]:
        """Return from which generation on tasks count, after steps changed or begin anew."""
        found = dict(self._run.record.first_generations)
        again = frozenset(rerun)
        for name in {*changed, *again}:
            if name in self._last_generations:
                first = self._last_generations[name] + 1
                done = first if name in again else found.get(name, FirstGenerations()).done
                found[name] = FirstGenerations(done=done, unfinished=first)
        return found

    def _step_of(self, task: StepTask) -> str:
        return self._expansion.run_of(task.number).step.id

    def _is_done(self, task: StepTask) -> bool:
        is_done = task.state is TaskState.DONE and not task.is_provisional
        return is_done and not self._run.is_void(self._step_of(task), task)


def _changed_steps(before: Workflow, now: Workflow, renewed: Collection[Path]) -> list[str]:
    known = before.steps_by_id
    has_other_items: set[str] = set()
    for step in ordered(now.steps):
        match step.foreach:
            case FileItems(path=path) if path in renewed:
                has_other_items.add(step.id)
            case StepItems(step=other) if other in has_other_items:
                has_other_items.add(step.id)
    return [
        step.id
        for step in now.steps
        if step.id in known
        and (step.id in has_other_items or _definition(step) != _definition(known[step.id]))
    ]


def _definition(step: Step) -> tuple[object, ...]:
    """Return what decides about the result of a step; how and when it runs does not."""
    return step.work, step.foreach, step.when, frozenset(step.depends_on)


def _with_descendants(workflow: Workflow, names: Iterable[str]) -> list[str]:
    found = set(names)
    for step in ordered(workflow.steps):
        if found.intersection(step.depends_on):
            found.add(step.id)
    return [step.id for step in workflow.steps if step.id in found]


def _undecided(workflow: Workflow, done: Mapping[str, int]) -> WorkflowError:
    named = list(starmap(_with_count, list(done.items())[:_NAMED]))
    if len(done) > _NAMED:
        named.append(f"{len(done) - _NAMED:,} more steps")
    steps = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    is_one = len(done) == 1 and sum(done.values()) == 1
    are, they = ("is", "it does or reads") if is_one else ("are", "they do or read")
    problem = f"{steps} {are} done, and the change is in what {they}"
    advice = "--changed keep keeps the results, --changed rerun runs and pays again"
    return WorkflowError(workflow.file, f"{problem}; {advice}")


def _with_count(name: str, count: int) -> str:
    return f"{name} ({count:,} {'run' if count == 1 else 'runs'})"


def _check_config(run: Run, workflow: Workflow) -> None:
    """Refuse what a run that has begun cannot change any more."""
    before = run.workflow
    if len(run.record.revisions) >= MAX_REVISIONS:
        problem = f"the run has taken {MAX_REVISIONS:,} files; begin a new run"
        raise WorkflowError(workflow.file, problem)
    if workflow.folder != before.folder:
        problem = f"is not in {before.folder}, where the run's relative paths begin; copy it there"
        raise WorkflowError(workflow.file, problem)
    if [(one.name, one.key) for one in workflow.scopes] != [
        (one.name, one.key) for one in before.scopes
    ]:
        problem = "the run's costs are booked in the budgets it began with; put them back"
        raise WorkflowError(workflow.file, problem, key="config.budget_scopes")
    if workflow.micro_usd is None and before.micro_usd is not None:
        problem = "the run began with a limit and keeps one; write budget_usd"
        raise WorkflowError(workflow.file, problem, key="config")


def _check_outputs(run: Run, workflow: Workflow, done_work: _DoneWork) -> None:
    """Refuse to read what a service has not kept: it keeps what the file read that it was sent."""
    if run.record.server is None:
        return
    read_before = {step_id for step_id, _ in fields_read(run.workflow)}
    for position, step in enumerate(workflow.steps):
        for parent, _ in fields_read(msgspec.structs.replace(workflow, steps=(step,))):
            if parent in done_work.done and parent not in read_before:
                problem = f"the service kept no output of {parent}, because no step read it"
                raise _wrong(workflow, position, f"{problem}; begin a new run")


def _wrong(workflow: Workflow, position: int, problem: str) -> WorkflowError:
    line = workflow.steps[position].line
    return WorkflowError(workflow.file, problem, line=line, key=f"steps[{position}]")
