"""Which places the texts and the condition of a step have, whatever its work is."""

from __future__ import annotations

from collections.abc import Iterator

from headgate.workflow.conditions import condition_references
from headgate.workflow.texts import Place, StepPlace, Template, Text, references
from headgate.workflow.workflow import Step


def step_places(step: Step) -> Iterator[Place]:
    """Give the places of a step."""
    for name in step.work.__struct_fields__:
        for value in _texts(getattr(step.work, name)):
            yield from references(value)
    yield from condition_references(step.when)


def fields_of_steps(step: Step) -> tuple[tuple[str, str], ...]:
    """Return the fields of other steps that a step refers to, by id and name, each once."""
    places = [place for place in step_places(step) if isinstance(place, StepPlace)]
    return tuple(dict.fromkeys((place.step, place.field) for place in places))


def _texts(value: object) -> Iterator[Text | Template]:
    if isinstance(value, Text | Template):
        yield value
    elif isinstance(value, tuple | dict):
        found = value.values() if isinstance(value, dict) else value
        yield from (one for one in found if isinstance(one, Text))
