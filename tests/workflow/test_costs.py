"""Estimates: what a step says, else what its request would cost at the most."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headgate.errors import WorkflowError
from headgate.workflow.costs import check_prices, estimated, limits_dollars
from headgate.workflow.placeholders import UnfilledError, fill, fill_template
from headgate.workflow.run_record import RunScope
from headgate.workflow.workflow import CommandWork, ModelWork, Workflow
from workflow.views import SimpleView, read

PRICES = "config: {prices: {m: {input: 2, output: 8}}}\n"


LIMITED = [RunScope(scope="workflow:w", micro_usd=1)]


def estimate(workflow: Workflow, item: Any = None, *, is_limited: bool = True) -> tuple[Any, Any]:
    step = workflow.steps[0]
    body = None
    if isinstance(step.work, ModelWork):
        body = fill_template(step.work.body, SimpleView(item))
    command = None
    if isinstance(step.work, CommandWork):
        command = [fill(one, SimpleView(item)) for one in step.work.command]
    request = SimpleNamespace(body=body, command=command)
    return estimated(workflow, step, request, is_limited=is_limited)


SAID = [
    ("command: [x]", (None, None)),
    ("command: [echo, x]", (0, 0)),
    ("command: [x], cost_usd: 0.07", (70_000, None)),
    ("command: [x], cost_usd: 0.07, estimate: {tokens: 5}", (70_000, 5)),
    ("command: [x], estimate: {usd: 0.5}", (500_000, None)),
    ("command: [x], estimate: {usd: 0.0000001, tokens: 9}", (1, 9)),
    ("model: unheard-of, prompt: x, cost_usd: 1, estimate: {tokens: 9}", (1_000_000, 9)),
    ("model: unheard-of, prompt: x, estimate: {usd: 1, tokens: 9}", (1_000_000, 9)),
    ("http: {url: 'http://x'}", (None, None)),
    ("target: t", (None, None)),
    ("call: 'a:b'", (None, None)),
]


@pytest.mark.parametrize(("step", "amounts"), SAID, ids=[step for step, _ in SAID])
def test_what_a_step_says_is_its_estimate(step: str, amounts: tuple[int, int]) -> None:
    assert estimate(read(f"steps: [{{id: a, {step}}}]")) == amounts


def test_a_call_to_a_model_is_measured_as_it_is_sent() -> None:
    text = PRICES + 'steps: [{id: a, foreach: [x], model: m, prompt: "{item}", max_tokens: 100}]'
    workflow = read(text)
    small, large = estimate(workflow, "x" * 4), estimate(workflow, "x" * 4_004)
    assert large[1] - small[1] == 1_000
    assert large[0] - small[0] == 2_000
    assert small[0] == (small[1] - 100) * 2 + 100 * 8


def test_every_answer_that_is_asked_for_is_counted() -> None:
    text = PRICES + "steps: [{id: a, model: m, prompt: x, max_tokens: 100, options: {n: 3}}]"
    assert estimate(read(text))[1] > 300


def test_tokens_that_are_said_go_before_those_that_are_measured() -> None:
    text = PRICES + "steps: [{id: a, model: m, prompt: x, estimate: {tokens: 7}}]"
    micro_usd, tokens = estimate(read(text))
    assert (micro_usd > 8_000, tokens) == (True, 7)


def test_a_model_without_a_price_is_refused_before_the_run() -> None:
    workflow = read("steps:\n  - {id: a, command: [x]}\n  - {id: b, model: unheard-of, prompt: x}")
    with pytest.raises(WorkflowError) as caught:
        check_prices(workflow, LIMITED)
    assert str(caught.value) == (
        "eval.yaml:3: steps[1].model: model 'unheard-of' has no known price; "
        'add [prices."unheard-of"] with input = … and output = … in dollars a million tokens '
        "to the settings, or config.prices to the file, or give the step an estimate with usd"
    )


def test_a_run_whose_budgets_limit_no_dollars_needs_no_prices() -> None:
    workflow = read("steps: [{id: b, model: unheard-of, prompt: x, max_tokens: 100}]")
    check_prices(workflow, [RunScope(scope="workflow:w")])
    micro_usd, tokens = estimate(workflow, is_limited=False)
    assert (micro_usd, tokens > 100) == (None, True)
    shared = [RunScope(scope="session:s"), RunScope(scope="session:s/workflow:w")]
    assert limits_dollars(shared)


@pytest.mark.parametrize(
    "text",
    [
        PRICES + "steps: [{id: a, model: m, prompt: x}]",
        "steps: [{id: a, model: gpt-4o-mini, prompt: x}]",
        "steps: [{id: a, model: unheard-of, prompt: x, cost_usd: 1}]",
        "steps: [{id: a, model: unheard-of, prompt: x, estimate: {usd: 1}}]",
        "config: {defaults: {estimate: {usd: 1}}}\nsteps: [{id: a, model: unheard-of, prompt: x}]",
        'steps: [{id: a, foreach: [m], model: "{item}", prompt: x}]',
    ],
)
def test_a_model_passes_that_has_a_price_or_an_estimate(text: str) -> None:
    check_prices(read(text), LIMITED)


def test_a_model_that_was_filled_in_and_has_no_price_fails_that_run_only() -> None:
    workflow = read('steps: [{id: a, foreach: [m], model: "{item}", prompt: x}]')
    assert estimate(workflow, "gpt-4o-mini")[0] > 0
    with pytest.raises(UnfilledError, match="model 'unheard-of' has no known price; add"):
        estimate(workflow, "unheard-of")
