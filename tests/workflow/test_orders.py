"""Requests and outputs: what a step asks for, and what of the answer others see."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headgate.workflow.backend import Amounts
from headgate.workflow.placeholders import EnvPlaceholder, parsed_template, parsed_text
from headgate.workflow.step_requests import (
    MAX_REFUSALS,
    CallRequest,
    CommandRequest,
    HttpRequest,
    ModelRequest,
    RefusedAmounts,
    Request,
    TargetRequest,
    decoded,
    encoded,
    output_of,
    request_of,
)
from headgate.workflow.workflow import CallWork, CommandWork, HttpWork, ModelWork, TargetWork, Work

COMMAND = CommandWork(command=(parsed_text("true"),))
HTTP = HttpWork(url=parsed_text("http://host/"))
MODEL = ModelWork(endpoint="openai", model="m", body=parsed_template({"model": "m"}), max_tokens=5)


class ItemView:
    """An item and nothing else."""

    index = 3
    run = {"id": "r", "name": "n"}  # noqa: RUF012

    def __init__(self, item: Any) -> None:
        self.item = item

    def field(self, step: str, name: str) -> Any:
        raise LookupError(step, name)


CASES: list[tuple[Work, Any, Request]] = [
    (
        CommandWork(
            command=(parsed_text("./x"), parsed_text("{item}"), parsed_text("--key={env.KEY}")),
            env={"A": parsed_text("{index}")},
            pass_env=("HOME",),
            stdin=parsed_text("{item.a}"),
            cwd=parsed_text("{env.DIR}"),
        ),
        {"a": [1]},
        CommandRequest(
            command=("./x", '{"a":[1]}', ("--key=", EnvPlaceholder(name="KEY"))),
            env={"A": "3"},
            pass_env=("HOME",),
            stdin="[1]",
            cwd=(EnvPlaceholder(name="DIR"),),
        ),
    ),
    (
        HttpWork(url=parsed_text("http://host/{item}"), headers={"x": parsed_text("{run.id}")}),
        "{env.KEY}",
        HttpRequest(url="http://host/{env.KEY}", method="POST", headers={"x": "r"}),
    ),
    (
        HttpWork(url=parsed_text("http://host/"), body=parsed_template("{item}")),
        None,
        HttpRequest(url="http://host/", method="POST", body=None),
    ),
    (
        CallWork(entry_point="a:b", given=parsed_template({"x": "{item}", "y": "no. {index}"})),
        [1],
        CallRequest(entry_point="a:b", given={"x": [1], "y": "no. 3"}),
    ),
    (MODEL, None, ModelRequest(endpoint="openai", model="m", body={"model": "m"}, max_tokens=5)),
    (
        TargetWork(target="t", action=parsed_text("say"), params=parsed_template({"a": "{item}"})),
        1,
        TargetRequest(target="t", action="say", params={"a": 1}),
    ),
]


@pytest.mark.parametrize(("work", "item", "request_"), CASES)
def test_a_request_has_everything_filled_but_the_environment(
    work: Work, item: Any, request_: Request
) -> None:
    assert request_of(work, ItemView(item)) == request_


@pytest.mark.parametrize("request_", [case[2] for case in CASES])
def test_a_request_is_read_as_it_was_written(request_: Request) -> None:
    assert decoded(bytes(encoded(request_))) == request_


def test_no_body_is_not_a_body_of_null() -> None:
    without = HttpRequest(url="http://host/", method="GET")
    assert without.body is msgspec.UNSET
    assert decoded(encoded(without)) == without


@pytest.mark.parametrize(
    ("work", "result", "output"),
    [
        (COMMAND, {"stdout": "x\n", "stderr": "", "exitCode": 0}, "x"),
        (COMMAND, {"stdout": "x\n\n", "stderr": ""}, "x\n"),
        (COMMAND, {"stdout": "x\r\n"}, "x"),
        (COMMAND, {"stdout": "[1]\n", "json": [1]}, [1]),
        (COMMAND, {"stdout": "null\n", "json": None}, None),
        (COMMAND, None, None),
        (HTTP, {"text": "hello"}, "hello"),
        (HTTP, {"text": "hello", "more": 1}, {"text": "hello", "more": 1}),
        (HTTP, [1, 2], [1, 2]),
        (HTTP, None, None),
        (CallWork(entry_point="a:b"), {"text": "kept"}, {"text": "kept"}),
        (TargetWork(target="t"), {"stdout": "kept"}, {"stdout": "kept"}),
        (MODEL, {"choices": [{"message": {"content": "hi"}}]}, "hi"),
        (MODEL, {"choices": [{"message": {"content": None, "tool_calls": []}}]}, None),
        (MODEL, {"choices": []}, {"choices": []}),
        (MODEL, {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        (MODEL, {"content": [{"type": "tool_use", "name": "x"}]}, ""),
        (MODEL, {"content": ["odd", 1]}, ""),
        (MODEL, "odd", "odd"),
    ],
)
def test_the_output_of_a_step_is_the_useful_part_of_its_result(
    work: Work, result: Any, output: Any
) -> None:
    assert output_of(work, result) == output


REFUSED = RefusedAmounts()
for _amounts in ((70, 100), (50, None), (None, None)):
    REFUSED.add("refused", _amounts)


@pytest.mark.parametrize(
    ("step", "amounts", "is_refused"),
    [
        ("other",   (70,   100),  True),
        ("other",   (71,   200),  True),
        ("other",   (69,   200),  False),
        ("other",   (100,  99),   False),
        ("refused", (50,   None), True),
        ("refused", (60,   None), True),
        ("refused", (49,   None), False),
        ("refused", (None, None), True),
        ("refused", (None, 1),    False),
        ("other",   (50,   None), False),
        ("other",   (None, None), False),
    ],
)  # fmt: skip
def test_what_is_as_large_in_every_way_as_a_refusal_is_refused(
    step: str, amounts: Amounts, is_refused: bool
) -> None:
    assert REFUSED.cover(step, amounts) is is_refused


def test_nothing_is_refused_before_a_budget_has_refused_something() -> None:
    assert not RefusedAmounts().cover("any", (0, 0))


def test_refusals_are_bounded() -> None:
    refusals = RefusedAmounts()
    for number in range(10 * MAX_REFUSALS):
        refusals.add("any", (10_000 - number, number))
    assert refusals.cover("any", (10_000, 0))
    assert sum(map(len, refusals._smallest.values())) == MAX_REFUSALS
