"""From the bytes of a workflow file to a workflow of which nothing is refused later.

Rule: everything that can be known before the run is checked here, and the first thing that is
wrong is one line with its file, line and key.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

import msgspec

from headgate.errors import WorkflowError
from headgate.workflow.config import read_config
from headgate.workflow.document import Value, read_document
from headgate.workflow.expansion import circle_in
from headgate.workflow.placeholders import (
    ALL_RUNS_FIELDS,
    ONE_RUN_FIELDS,
    IndexPlaceholder,
    ItemPlaceholder,
    Place,
    StepPlaceholder,
    place_text,
)
from headgate.workflow.steps import ReadStep, read_steps
from headgate.workflow.workflow import Step, StepItems, Workflow

# What steps say of each other: names that must exist, fields that a step has, and no circles.
#
# A text or a condition that names a step makes it a parent. Rule: after this nothing that a step
# refers to can be missing, and whatever it refers to has ended when it runs.

_LISTS = ("outputs", "results")
_SHOWN_IN_CIRCLE = 12
_SHOWN_CHARACTERS = 64


def linked(read: list[ReadStep]) -> tuple[Step, ...]:
    """Return the steps with all their parents, or raise `WorkflowError`."""
    by_id = _by_id(read)
    steps = {one.step.id: _with_parents(one, by_id) for one in read}
    circle = circle_in({name: step.depends_on for name, step in steps.items()})
    if circle:
        shown = (*circle[:_SHOWN_IN_CIRCLE], "…" if len(circle) > _SHOWN_IN_CIRCLE else circle[0])
        problem = f"waits for itself: {' → '.join(shown)}; take one of these dependencies out"
        next(one for one in read if one.step.id == circle[0]).value.refuse(problem)
    return tuple(steps.values())


def _by_id(read: list[ReadStep]) -> dict[str, Step]:
    # Some file systems take names for the same that differ in case, and items are kept in files.
    earlier: dict[str, str] = {}
    for one in read:
        step_id = one.step.id
        other = earlier.get(step_id.lower())
        if other is not None:
            same = "is the id of" if other == step_id else "is but for its case the id of"
            one.fields["id"].refuse(f"{step_id!r} {same} another step; rename one of them")
        earlier[step_id.lower()] = step_id
    return {one.step.id: one.step for one in read}


def _with_parents(one: ReadStep, by_id: Mapping[str, Step]) -> Step:
    step = one.step
    for parent in step.depends_on:
        _check_known(parent, step, one.fields["depends_on"], by_id)
    parents = dict.fromkeys(step.depends_on)
    if isinstance(step.foreach, StepItems):
        _check_items(step.foreach.step, step, one.fields["foreach"], by_id)
        parents[step.foreach.step] = None
    for value, place in one.uses.places:
        if isinstance(place, ItemPlaceholder | IndexPlaceholder) and step.foreach is None:
            _refuse_item(place, value, is_text=value is not one.fields.get("when"))
        if isinstance(place, StepPlaceholder):
            _check_known(place.step, step, value, by_id)
            _check_field(place, step, value, by_id[place.step])
            parents[place.step] = None
    if len(parents) == len(step.depends_on):
        return step
    return msgspec.structs.replace(step, depends_on=tuple(parents))


def _check_known(name: str, step: Step, value: Value, by_id: Mapping[str, Step]) -> None:
    if name == step.id:
        value.refuse(f"{name!r} is this step itself; take it out")
    if name in by_id:
        return
    close = get_close_matches(name[:_SHOWN_CHARACTERS], by_id, n=1)
    advice = f"did you mean {close[0]!r}?" if close else "write the id of a step"
    value.refuse(f"there is no step {name[:_SHOWN_CHARACTERS]!r}; {advice}")


def _check_items(name: str, step: Step, value: Value, by_id: Mapping[str, Step]) -> None:
    _check_known(name, step, value, by_id)
    if by_id[name].foreach is None:
        value.refuse(f"{name!r} has no items; name a step with foreach")


def _refuse_item(place: Place, value: Value, *, is_text: bool) -> NoReturn:
    shown = place_text(place)
    advice = f"; write foreach, or {{{shown}}} for the text" if is_text else "; write foreach"
    value.refuse(f"{shown} is for steps with foreach{advice}")


def _check_field(place: StepPlaceholder, step: Step, value: Value, other: Step) -> None:
    runs_along = isinstance(step.foreach, StepItems) and step.foreach.step == other.id
    has_one_run = other.foreach is None or runs_along
    if place.field in (ONE_RUN_FIELDS if has_one_run else ALL_RUNS_FIELDS):
        return
    if runs_along and place.field in _LISTS:
        return
    if runs_along:
        problem = "this step runs along with it, item by item; write output, outputs or status"
    elif other.foreach is None:
        problem = "it runs once; write output, result or status"
    else:
        problem = f"it runs for each item; write outputs, or foreach: {{step: {other.id}}}"
    value.refuse(f"{other.id!r} has no {place.field} here: {problem}")


ROOT_KEYS = ("name", "config", "steps")
MAX_NAME_LENGTH = 100

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MADE_OF = "write letters, digits and . _ -, beginning with a letter or a digit"


def read_workflow(path: Path, source: bytes, *, name: str | None = None) -> Workflow:
    """Read a workflow, or raise `WorkflowError`; relative paths in it begin beside `path`.

    Nothing is read but `source`. A name that is given goes before that of the file.
    """
    with _collecting_later():
        return _read(path, source, name)


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Leave the garbage alone meanwhile: the values of a large file are looked through too often.

    There is next to none, and a file is bounded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read(path: Path, source: bytes, name: str | None) -> Workflow:
    file = str(path)
    root = Value(file, read_document(file, source))
    fields = root.fields(ROOT_KEYS, "a workflow")
    if "steps" not in fields:
        root.refuse("has no steps; write them")
    folder = path.absolute().parent
    written = (
        fields["name"].name(_NAME, _MADE_OF, most=MAX_NAME_LENGTH) if "name" in fields else None
    )
    config = read_config(fields.get("config"))
    return Workflow(
        name=name or written or _name_of(path),
        folder=folder,
        steps=linked(read_steps(fields["steps"], config, folder)),
        micro_usd=config.micro_usd,
        scopes=config.scopes,
        endpoints=config.endpoints,
        prices=config.prices,
        concurrency=config.concurrency,
        fail_fast=config.fail_fast,
        on_exhausted=config.on_exhausted,
        file=file,
    )


def _name_of(path: Path) -> str:
    name = path.stem
    if len(name) > MAX_NAME_LENGTH or _NAME.fullmatch(name) is None:
        problem = f"{name[:60]!r} is no name of a workflow; write name: … into the file"
        raise WorkflowError(str(path), problem)
    return name
