"""The steps of a workflow file, one by one.

What they say of each other is checked when all are read, by `headgate.workflow.links`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from headgate.workflow.config import Config
from headgate.workflow.terms import TERMS, read_terms
from headgate.workflow.uses import Uses
from headgate.workflow.values import Value
from headgate.workflow.workflow import FileItems, Items, ListItems, Step, StepItems
from headgate.workflow.works import WORK_KEYS, read_work

STEP_KEYS = ("id", "foreach", "depends_on", "when", *TERMS, "cost_usd", "labels")
FOREACH_KEYS = ("file", "step")
MAX_STEPS = 10_000
MAX_ID_LENGTH = 64
OWN_LABELS = ("run", "step")
"""Labels that every task of a run has, and that tell which run and step it is of."""
MAX_LABELS = 30
MAX_LABEL_KEY_LENGTH = 64
MAX_LABEL_VALUE_LENGTH = 256

_ALL_KEYS = (*STEP_KEYS, *(key for keys in WORK_KEYS.values() for key in keys))
_ID = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_ID_MADE_OF = "write letters, digits, _ and -, beginning with a letter"


class ReadStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step, and where in the file it said what has to do with other steps."""

    step: Step
    value: Value
    fields: dict[str, Value]
    uses: Uses


def read_steps(value: Value, config: Config, folder: Path) -> list[ReadStep]:
    """Read all steps."""
    entries = value.items("steps")
    if not entries:
        value.refuse("has no steps; write at least one")
    if len(entries) > MAX_STEPS:
        value.refuse(f"has {len(entries):,} steps, at most {MAX_STEPS:,} are run; use foreach")
    return [_step(entry, config, folder) for entry in entries]


def read_id(value: Value) -> str:
    """Read the id of a step."""
    return value.name(_ID, _ID_MADE_OF, most=MAX_ID_LENGTH)


def _step(value: Value, config: Config, folder: Path) -> ReadStep:
    fields = value.fields(_ALL_KEYS, "a step")
    if "id" not in fields:
        value.refuse("has no id; write one")
    uses = Uses()
    step = Step(
        id=read_id(fields["id"]),
        line=value.line,
        work=read_work(value, fields, uses, defaults=config.defaults, endpoints=config.endpoints),
        depends_on=_parents(fields),
        foreach=_foreach(fields["foreach"], folder) if "foreach" in fields else None,
        when=uses.condition(fields["when"]) if "when" in fields else None,
        labels=_labels(fields["labels"]) if "labels" in fields else {},
        **_terms(fields, config),
    )
    return ReadStep(step=step, value=value, fields=fields, uses=uses)


def _terms(fields: dict[str, Value], config: Config) -> dict[str, Any]:
    own = read_terms(fields)
    terms = config.defaults.terms | own
    if "cost_usd" not in fields:
        return terms
    terms["cost_micro_usd"] = fields["cost_usd"].amount()
    if "estimate" not in own:
        terms.pop("estimate", None)
    elif own["estimate"].micro_usd is not None:
        problem = "says usd beside cost_usd, which is what the step costs; keep one of them"
        fields["estimate"].refuse(problem)
    return terms


def _parents(fields: dict[str, Value]) -> tuple[str, ...]:
    value = fields.get("depends_on")
    if value is None:
        return ()
    return tuple(dict.fromkeys(value.words("steps")))


def _foreach(value: Value, folder: Path) -> Items:
    if value.is_list:
        return ListItems(values=tuple(value.plain()))
    if not value.is_object:
        return _file(value, folder)
    fields = value.fields(FOREACH_KEYS, "foreach")
    if len(fields) != 1:
        value.refuse("must have either file or step; write one of them")
    return (
        _file(fields["file"], folder) if "file" in fields else StepItems(step=fields["step"].word())
    )


def _file(value: Value, folder: Path) -> FileItems:
    name = value.word() if value.is_text else ""
    if "{" in name or not name.strip():
        problem = "must be a list, the name of a JSONL file, or {step: other}"
        value.refuse(f"{problem}; items are known before the run, so no places stand here")
    return FileItems(path=folder / name)


def _labels(value: Value) -> dict[str, str]:
    entries = value.entries("labels")
    if len(entries) > MAX_LABELS:
        value.refuse(f"has {len(entries)} labels, at most {MAX_LABELS} are kept; leave some out")
    labels = {key: entry.word() for key, entry in entries.items()}
    for key in OWN_LABELS:
        if key in entries:
            entries[key].refuse("is set for every step; take another name")
    for key, label in labels.items():
        if not key or len(key) > MAX_LABEL_KEY_LENGTH or not key.isprintable():
            problem = f"is no label; a name has 1 to {MAX_LABEL_KEY_LENGTH} printable characters"
            entries[key].refuse(problem)
        if len(label) > MAX_LABEL_VALUE_LENGTH or not label.isprintable():
            problem = f"must be up to {MAX_LABEL_VALUE_LENGTH} printable characters; shorten it"
            entries[key].refuse(problem)
    return labels
