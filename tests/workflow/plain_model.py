"""The rules of a run as a person would write them down: slow, plain, one step after another.

Outcomes here do not depend on the order of things: every run of a step always succeeds or always
fails. So whatever the conductor does, and however often it is interrupted, it must end like this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
from hypothesis import strategies as st

from headgate.core.task import OnParentFailure
from headgate.workflow.conditions import parsed_condition
from headgate.workflow.workflow import ListItems, Step, StepItems, Workflow
from workflow.fake_backend import a_step, a_workflow

Word = Literal["done", "failed", "skipped"]


class Rule(msgspec.Struct, frozen=True):
    """A condition in the words of a file, and what it means, given the words of all runs."""

    source: str
    parent: str | None
    holds: Callable[[int, Mapping[str, list[Word]]], bool]


class Plan(msgspec.Struct, frozen=True):
    """A workflow, its conditions, and which of its runs fail."""

    workflow: Workflow
    rules: dict[str, Rule]
    failing: frozenset[tuple[str, int]]


def expected(plan: Plan) -> dict[str, list[Word]]:
    """Return how every run of every step ends."""
    words: dict[str, list[Word]] = {}
    for step in plan.workflow.steps:
        count = _count(plan.workflow, step)
        words[step.id] = [_word(plan, step, index, words) for index in range(count)]
    return words


def _count(workflow: Workflow, step: Step) -> int:
    match step.foreach:
        case ListItems(values=values):
            return len(values)
        case StepItems(step=other):
            return _count(workflow, workflow.step(other))
        case _:
            return 1


def _word(plan: Plan, step: Step, index: int, words: Mapping[str, list[Word]]) -> Word:
    source = step.foreach.step if isinstance(step.foreach, StepItems) else None
    if step.on_parent_failure is not OnParentFailure.RUN:
        for parent in step.depends_on:
            found = [words[parent][index]] if parent == source else words[parent]
            if "failed" in found or (found and set(found) == {"skipped"}):
                return "skipped"
    rule = plan.rules.get(step.id)
    if rule is not None and not rule.holds(index, words):
        return "skipped"
    return "failed" if (step.id, index) in plan.failing else "done"


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw workflows of a few steps, each of which depends on earlier ones."""
    steps: list[Step] = []
    rules: dict[str, Rule] = {}
    failing: set[tuple[str, int]] = set()
    for number in range(draw(st.integers(1, 7))):
        step = _step(draw, f"s{number}", steps)
        if draw(st.integers(0, 3)) == 0:
            rule = rules[step.id] = _rule(draw, step, steps)
            parents = step.depends_on if rule.parent is None else (*step.depends_on, rule.parent)
            step = msgspec.structs.replace(
                step,
                when=parsed_condition(rule.source),
                depends_on=tuple(dict.fromkeys(parents)),
            )
        steps.append(step)
        for index in draw(st.sets(st.integers(0, 5), max_size=2)):
            failing.add((step.id, index))
    return Plan(a_workflow(*steps), rules, frozenset(failing))


def _step(draw: st.DrawFn, name: str, earlier: list[Step]) -> Step:
    with_items = [step.id for step in earlier if step.foreach is not None]
    kinds = ["one", "list", "step"] if with_items else ["one", "list"]
    parents = draw(st.sets(st.sampled_from([step.id for step in earlier]))) if earlier else set()
    foreach: ListItems | StepItems | None = None
    match draw(st.sampled_from(kinds)):
        case "list":
            foreach = ListItems(values=tuple(range(draw(st.integers(0, 5)))))
        case "step":
            foreach = StepItems(step=draw(st.sampled_from(with_items)))
            parents.add(foreach.step)
    return a_step(
        name,
        foreach=foreach,
        depends_on=tuple(sorted(parents)),
        priority=draw(st.integers(-2, 2)),
        on_parent_failure=draw(st.sampled_from(OnParentFailure)),
        cost_micro_usd=draw(st.sampled_from([None, 10, 70])),
    )


def _rule(draw: st.DrawFn, step: Step, earlier: list[Step]) -> Rule:
    own = isinstance(step.foreach, StepItems) and step.foreach.step
    others = [one for one in earlier if one.id != own]
    if not others or draw(st.booleans()):
        return Rule("index in [0, 2]", None, lambda index, _: index in {0, 2})
    other = draw(st.sampled_from(others))
    if other.foreach is None:
        # The output of a run is the index of its item; nothing that is not done has one.
        return Rule(
            f"steps.{other.id}.output == 0", other.id, lambda _, words: words[other.id] == ["done"]
        )
    return Rule(
        f"steps.{other.id}.done > 1",
        other.id,
        lambda _, words: words[other.id].count("done") > 1,
    )
