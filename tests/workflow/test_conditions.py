"""Conditions: what holds, what is refused when a file is read; there is always an answer."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.workflow.conditions import (
    ConditionError,
    condition_references,
    holds,
    parsed_condition,
)
from headgate.workflow.placeholders import IndexPlaceholder, ItemPlaceholder, StepPlaceholder
from workflow.views import SimpleView

VIEW = SimpleView(
    {"n": 3, "kind": "hard", "tags": ["a", "b"], "flag": True, "none": None, "a b": {"c": 1}},
    index=2,
    fields={
        ("check", "output"): {"score": 0.7},
        ("my-step", "status"): "done",
        ("all", "outputs"): [1, None, 3],
    },
)

HOLD = [
    "true",
    "not false",
    "item.n == 3",
    "item.n == 3.0",
    "item.n != '3'",
    "2 < item.n <= 3",
    "item.n > -1",
    "item.kind == 'hard' and index == 2",
    "item.kind in ['hard', \"new\"]",
    "item.kind not in ('easy',)",
    "'a' in item.tags",
    "'ar' in item.kind",
    "'c' in item['a b']",
    "item['a b'].c == 1",
    "item.tags[-1] == 'b'",
    "len(item.tags) == 2",
    "len(item.kind) > len(item.tags)",
    "item.flag",
    "item.flag == true",
    "item.flag != 1",
    "item.none == null",
    "item.missing == null",
    "item.missing.deeper[3] == None",
    "item.n.x == null",
    "len(item.n) == null",
    "not item.missing",
    "not (item.n < 3 or item.n > 3)",
    "steps.check.output.score > 0.5",
    "steps['my-step'].status == 'done'",
    "steps.all.outputs == [1, null, 3]",
    "run.name == 'eval'",
    "'b' > 'a'",
    "item.n or item.missing.x",
    " item.n \n == 3",
]
DO_NOT_HOLD = [
    "false",
    "null",
    "item.missing",
    "item.n < 'a'",
    "item.n > 'a'",
    "item.missing < 1",
    "item.missing > 1",
    "item.none <= null",
    "item.flag < 2",
    "item.tags < item.tags",
    "1 in item.kind",
    "'a' in item.n",
    "'a' in item.missing",
    "true in [1]",
    "1 < item.n < 3",
    "''",
    "0",
]


@pytest.mark.parametrize("source", HOLD)
def test_a_condition_holds(source: str) -> None:
    assert holds(parsed_condition(source), VIEW)


@pytest.mark.parametrize("source", DO_NOT_HOLD)
def test_a_condition_does_not_hold(source: str) -> None:
    assert not holds(parsed_condition(source), VIEW)


REFUSED = [
    "",
    "[]",
    "item.n == 3,",
    "item.n ==",
    "item.n = 3",
    "item.n == 3; import os",
    "__import__('os')",
    "item.__class__()",
    "len(item, item)",
    "len(item, key=1)",
    "[x for x in item]",
    "{'a': 1}",
    "item if item else item",
    "lambda: 1",
    "f'{item}'",
    "item.n + 1",
    "item.n ** 99999",
    "-item.n",
    "~1",
    "item[item.n]",
    "item[0:1]",
    "item[1.5]",
    "item[true]",
    "(item := 3)",
    "b'x'",
    "1j",
    "...",
    "env.HOME",
    "'a'.x",
    "os",
    "steps.a",
    "steps[0].output",
    "item is null",
    "await item",
    "*item",
    "item\0",
    "(" * 900 + "1" + ")" * 900,
    "not " * 21 + "1",
]


@pytest.mark.parametrize("source", REFUSED, ids=[repr(source[:30]) for source in REFUSED])
def test_what_is_no_condition_is_refused_in_one_line(source: str) -> None:
    with pytest.raises(ConditionError) as caught:
        parsed_condition(source)
    assert "\n" not in str(caught.value)


def test_references_are_all_places_of_a_condition() -> None:
    source = "not item.a and (index < len(steps.s.outputs) or 1 in [steps.t.status])"
    assert set(condition_references(parsed_condition(source))) == {
        ItemPlaceholder(path=("a",)),
        IndexPlaceholder(),
        StepPlaceholder(step="s", field="outputs"),
        StepPlaceholder(step="t", field="status"),
    }
    assert list(condition_references(None)) == []


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)
OPERANDS = """
item item.a item[0] item['a'].b index 1 0.5 'a' null true steps.s.output steps.s.output.x[1] run.id
[1,'a'] len(item) len(item.a)
"""
operands = st.sampled_from(OPERANDS.split())
signs = st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "in", "not in"])
comparisons = st.lists(st.tuples(signs, operands), max_size=2).flatmap(
    lambda rest: operands.map(
        lambda first: " ".join([first, *(f"{sign} {value}" for sign, value in rest)])
    )
)
conditions = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        inner.map(lambda one: f"not ({one})"),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
            lambda three: f"({three[0]}) {three[1]} ({three[2]})"
        ),
    ),
    max_leaves=5,
)


@given(conditions, json_values, json_values)
def test_a_condition_that_was_read_always_has_an_answer(
    source: str, item: Any, output: Any
) -> None:
    view = SimpleView(item, fields={("s", "output"): output})
    assert holds(parsed_condition(f"true and ({source})"), view) in (True, False)


def test_values_that_are_nested_very_deeply_have_an_answer() -> None:
    deep: list[Any] = []
    other: list[Any] = []
    for _ in range(100_000):
        deep, other = [deep], [other]
    assert holds(parsed_condition("item.a == item.b"), SimpleView({"a": deep, "b": other})) is False


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(source: str) -> None:
    with suppress(ConditionError):
        parsed_condition(source)
