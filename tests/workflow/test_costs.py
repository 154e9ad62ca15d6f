"""Estimates: what a step says, else what its request would cost at the most."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.core.estimates import MAX_KINDS, Kind, Learned
from headgate.errors import WorkflowError
from headgate.storage.data_lock import hold_store
from headgate.storage.usage import KnownKind
from headgate.workflow.costs import (
    ESTIMATES_FILE,
    MAX_KEPT_KINDS,
    check_prices,
    earlier_kinds,
    estimated,
    limits_dollars,
    write_kinds,
)
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


def kept(name: str, fed_at: float, *, workflow: str = "flow", cost: int = 5) -> KnownKind:
    known = Learned()
    known.micro_usd.add(cost)
    return KnownKind(kind=Kind(workflow, name), fed_at=fed_at, learned=known)


def names(kinds: list[KnownKind]) -> list[str]:
    return [one.kind.name for one in kinds]


def test_what_a_workflow_has_learned_is_known_to_its_next_run_and_to_no_other(
    tmp_path: Path,
) -> None:
    assert earlier_kinds(tmp_path, "flow") == []
    write_kinds(tmp_path, [kept("a", 1.0), kept("b", 2.0)])
    write_kinds(tmp_path, [kept("c", 3.0, workflow="other")])
    assert earlier_kinds(tmp_path, "flow") == [kept("a", 1.0), kept("b", 2.0)]
    assert names(earlier_kinds(tmp_path, "other")) == ["c"]
    assert (tmp_path / ESTIMATES_FILE).stat().st_mode & 0o077 == 0


@pytest.mark.timeout(10)
def test_a_run_ends_while_a_service_holds_the_same_data_directory(tmp_path: Path) -> None:
    with hold_store(tmp_path / "headgate.db"):
        write_kinds(tmp_path, [kept("a", 1.0)])
    assert names(earlier_kinds(tmp_path, "flow")) == ["a"]


def test_of_each_kind_what_was_fed_last_is_kept(tmp_path: Path) -> None:
    write_kinds(tmp_path, [kept("a", 5.0, cost=50), kept("b", 1.0, cost=10)])
    write_kinds(tmp_path, [kept("a", 4.0, cost=40), kept("b", 2.0, cost=20)])
    assert earlier_kinds(tmp_path, "flow") == [kept("b", 2.0, cost=20), kept("a", 5.0, cost=50)]


BROKEN = {
    "no JSON": b"{",
    "another shape": b'{"kinds": [{"kind": 1}]}',
    "no text": b"\xff\xfe",
    "empty": b"",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_cannot_be_used_is_one_warning_and_written_anew(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / ESTIMATES_FILE
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="cannot be used") as told:
        assert earlier_kinds(tmp_path, "flow") == []
    assert len(told) == 1
    write_kinds(tmp_path, [kept("a", 1.0)])
    assert names(earlier_kinds(tmp_path, "flow")) == ["a"]


def test_what_cannot_be_written_is_a_warning_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / ESTIMATES_FILE).mkdir()
    with pytest.warns(UserWarning, match="cannot be written"):
        write_kinds(tmp_path, [kept("a", 1.0)])


def test_the_kinds_that_are_kept_are_bounded_and_the_one_fed_longest_ago_goes(
    tmp_path: Path,
) -> None:
    write_kinds(tmp_path, [kept(f"k{at}", float(at)) for at in range(MAX_KINDS + 5)])
    found = names(earlier_kinds(tmp_path, "flow"))
    assert (len(found), found[0]) == (MAX_KINDS, "k5")
    workflows = MAX_KEPT_KINDS // MAX_KINDS
    for number in range(workflows):
        some = [kept(f"k{at}", 1e6 + number, workflow=f"w{number}") for at in range(MAX_KINDS)]
        write_kinds(tmp_path, some)
    assert earlier_kinds(tmp_path, "flow") == []
    assert len(earlier_kinds(tmp_path, f"w{workflows - 1}")) == MAX_KINDS
