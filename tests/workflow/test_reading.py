"""What a file means once it is read, and that what was written is what is read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.api import submission as intake
from headgate.core.task import OnParentFailure
from headgate.providers.prices import Price
from headgate.workflow import parser
from headgate.workflow.config import BUILT_IN
from headgate.workflow.parser import read_workflow
from headgate.workflow.placeholders import (
    EnvPlaceholder,
    PlaceholderError,
    Template,
    Text,
    parsed_template,
    parsed_text,
)
from headgate.workflow.workflow import (
    BudgetScope,
    CallWork,
    CommandWork,
    Endpoint,
    Estimate,
    FileItems,
    HttpWork,
    ListItems,
    ModelWork,
    Step,
    StepItems,
    TargetWork,
    Workflow,
)
from workflow.views import read

WHOLE = """
name: nightly
config:
  budget_usd: 5.00
  budget_scopes:
    - {name: Session, key: "{env.HEADGATE_SESSION_ID}", budget_usd: 50}
    - {name: team, key: search}
  defaults: {priority: 3, retries: 2, timeout: 5m, endpoint: local, model: m, max_tokens: 64}
  endpoints:
    local: {kind: openai, url: "http://127.0.0.1:8080/v1", key: "{env.KEY}", headers: {X-A: 1}}
  prices:
    m: {input: 0.10, output: "2"}
  concurrency: 3
  fail_fast: true
  on_exhausted: wait
steps:
  - id: case
    foreach: cases.jsonl
    prompt: "{item.question}"
    system: Be short.
    temperature: 0
    options: {seed: 7}
    weight: 2
    agent: a
    labels: {kind: 010}
  - id: judge
    foreach: {step: case}
    when: steps.case.output != ''
    command: [./judge, "{item.answer}", no, 1.50]
    env: {DEBUG: 1, KEY: "{env.KEY}"}
    pass_env: LANG
    stdin: "{steps.case.output}"
    cwd: sub
    cost_usd: 0.07
  - id: report
    depends_on: judge
    http:
      url: "https://x/{run.id}"
      method: PUT
      headers: {A: "{env.B}"}
      body: ["{steps.judge.outputs}"]
    on_parent_failure: run
    timeout: 1.5
    estimate: {usd: 0.5, tokens: 10}
  - {id: call, call: "a.b:c", with: {n: 1}}
  - {id: act, target: t, action: click, params: {a: 1}, tab_id: 7, slot: s}
  - {id: open, input: "{steps.call.output}"}
"""


def parsed(source: str) -> Text:
    return parsed_text(source)


def test_every_key_of_a_file_has_its_meaning() -> None:
    workflow = read(WHOLE)
    case, judge, report, call, act, last = workflow.steps
    assert workflow.name == "nightly"
    assert workflow.folder == Path.cwd()
    assert workflow.micro_usd == 5_000_000
    assert workflow.scopes == (
        BudgetScope(
            name="session",
            key=Text(parts=(EnvPlaceholder(name="HEADGATE_SESSION_ID"),)),
            micro_usd=50_000_000,
            line=6,
        ),
        BudgetScope(name="team", key=parsed("search"), line=7),
    )
    assert (workflow.concurrency, workflow.fail_fast, workflow.on_exhausted) == (3, True, "wait")
    assert workflow.prices == {"m": Price(input="0.10", output="2")}
    assert workflow.endpoints == BUILT_IN | {
        "local": Endpoint(
            name="local",
            kind="openai",
            url=Text(parts=("http://127.0.0.1:8080/v1",), is_url=True),
            key=Text(parts=(EnvPlaceholder(name="KEY"),)),
            headers={"X-A": parsed("1")},
            line=10,
        )
    }
    assert case.foreach == FileItems(path=Path.cwd() / "cases.jsonl")
    assert case.line == 17
    assert (case.priority, case.retries, case.timeout_seconds) == (3, 2, 300.0)
    assert (case.weight, case.agent, case.labels) == (2.0, "a", {"kind": "010"})
    assert judge.work == CommandWork(
        command=tuple(map(parsed, ["./judge", "{item.answer}", "no", "1.50"])),
        env={"DEBUG": parsed("1"), "KEY": parsed("{env.KEY}")},
        pass_env=("LANG",),
        stdin=parsed("{steps.case.output}"),
        cwd=parsed("sub"),
    )
    assert judge.foreach == StepItems(step="case")
    assert (judge.depends_on, judge.cost_micro_usd) == (("case",), 70_000)
    assert report.work == HttpWork(
        url=msgspec.structs.replace(parsed("https://x/{run.id}"), is_url=True),
        method="PUT",
        headers={"A": parsed("{env.B}")},
        body=parsed_template(["{steps.judge.outputs}"]),
    )
    assert report.on_parent_failure is OnParentFailure.RUN
    assert report.timeout_seconds == 1.5
    assert report.estimate == Estimate(micro_usd=500_000, tokens=10)
    assert call.work == CallWork(entry_point="a.b:c", given=Template(value={"n": 1}))
    assert act.work == TargetWork(
        target="t",
        action=parsed("click"),
        params=Template(value={"a": 1}),
        tab_id=parsed("7"),
        slot="s",
    )
    assert last.work == TargetWork(input=parsed_template("{steps.call.output}"))
    assert last.depends_on == ("call",)


def body_of(step: str, config: str = "{}") -> dict[str, Any]:
    work = read(f"config: {config}\nsteps: [{{id: a, foreach: [1], {step}}}]").steps[0].work
    assert isinstance(work, ModelWork)
    body: dict[str, Any] = work.body.value
    return body | {"to": work.endpoint, "most": work.max_tokens}


LOCAL = "{endpoints: {local: {kind: openai, url: 'http://x'}}, defaults: {endpoint: local}}"
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    (
        "model: gpt-x, prompt: Hi",
        "{}",
        {
            "to": "openai",
            "most": 1_024,
            "model": "gpt-x",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_completion_tokens": 1_024,
        },
    ),
    (
        "model: m, prompt: Hi, system: Be short, temperature: 0, max_tokens: 5",
        LOCAL,
        {
            "to": "local",
            "most": 5,
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be short"},
                {"role": "user", "content": "Hi"},
            ],
            "max_tokens": 5,
            "temperature": 0.0,
        },
    ),
    (
        "model: claude-x, prompt: Hi, system: Be short, options: {top_k: 3}",
        "{}",
        {
            "to": "anthropic",
            "most": 1_024,
            "model": "claude-x",
            "system": "Be short",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 1_024,
            "top_k": 3,
        },
    ),
    (
        "model: m, messages: [{role: user, content: Hi}], options: {max_tokens: 9}",
        "{}",
        {
            "to": "openai",
            "most": 9,
            "model": "m",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 9,
        },
    ),
    (
        'model: "{item.model}", messages: "{item.messages}"',
        "{defaults: {max_tokens: 7}}",
        {
            "to": "openai",
            "most": 7,
            "model": Text(parts=("", parsed("{item.model}").parts[0])),
            "messages": parsed("{item.messages}"),
            "max_completion_tokens": 7,
        },
    ),
]


@pytest.mark.parametrize(("step", "config", "body"), BODIES, ids=[one[0] for one in BODIES])
def test_a_call_to_a_model_is_the_request_that_its_endpoint_wants(
    step: str, config: str, body: dict[str, Any]
) -> None:
    assert body_of(step, config) == body


def test_a_step_says_more_than_the_defaults() -> None:
    text = """
config: {defaults: {retries: 5, estimate: {usd: 1}, target: t, on_parent_failure: run}}
steps:
  - {id: a, action: x, retries: 0, on_parent_failure: fail}
  - {id: b, action: x, target: u, cost_usd: 2}
"""
    first, second = read(text).steps
    assert (first.retries, first.on_parent_failure) == (0, OnParentFailure.FAIL)
    assert first.estimate == Estimate(micro_usd=1_000_000)
    assert (second.retries, second.estimate, second.cost_micro_usd) == (5, None, 2_000_000)
    assert [step.work.target for step in (first, second) if isinstance(step.work, TargetWork)] == [
        "t",
        "u",
    ]


def test_an_endpoint_that_is_always_there_can_be_changed_in_part() -> None:
    text = "config: {endpoints: {openai: {key: '{env.MINE}'}}}\nsteps: [{id: a, command: [x]}]"
    openai = read(text).endpoints["openai"]
    assert openai.key == parsed("{env.MINE}")
    assert openai.url == BUILT_IN["openai"].url


def test_anchors_and_merged_keys_share_what_steps_have_in_common() -> None:
    text = """
steps:
  - &first {id: a, command: [x], retries: 3}
  - {<<: *first, id: b}
"""
    first, second = read(text).steps
    assert (second.id, second.work, second.retries) == ("b", first.work, 3)


def test_amounts_are_read_from_their_digits() -> None:
    text = "steps: [{id: a, command: [x], cost_usd: 0.1234565000000000001}]"
    assert read(text).steps[0].cost_micro_usd == 123_457


def test_labels_fit_what_a_task_may_have() -> None:
    assert parser.MAX_LABELS + len(parser.OWN_LABELS) == intake.MAX_LABELS
    assert parser.MAX_LABEL_KEY_LENGTH == intake.MAX_LABEL_KEY_LENGTH
    assert parser.MAX_LABEL_VALUE_LENGTH == intake.MAX_LABEL_VALUE_LENGTH


def test_ten_thousand_steps_are_read_quickly() -> None:
    lines = ["steps:", "  - {id: s0, command: [x]}"]
    for number in range(1, 10_000):
        before = f"steps.s{number - 1}.output"
        lines += [
            f"  - id: s{number}",
            f"    when: \"{before}.score > 0.5 and run.name == 'eval'\"",
            f'    command: ["./evaluate", "{{{before}}}", plain]',
            "    env: {A: 1, B: two}",
            "    retries: 2",
            "    timeout: 5m",
            "    cost_usd: 0.07",
        ]
    source = "\n".join(lines).encode()
    began = time.process_time()
    yaml.load(source, Loader=yaml.CSafeLoader)
    floor_seconds = time.process_time() - began
    began = time.process_time()
    workflow = read_workflow(Path("eval.yaml"), source)
    # 1.3 to 1.6 times what the YAML alone takes, on whatever machine.
    assert time.process_time() - began < 3 * floor_seconds
    assert len(workflow.steps) == 10_000


# Steps as a file may write them, and what they are once they are read.

harmless = st.text(max_size=12).filter(lambda text: text.isprintable() and "{" not in text)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,10}", fullmatch=True)
placed = st.sampled_from(["{run.id}", "a {run.name} b", "{{item}}", "{env.HOME}/x", "{}"])
scalars: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | harmless | st.just(1.5)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(harmless, inner, max_size=3),
    max_leaves=6,
)
arguments = st.lists(harmless.filter(bool) | placed, min_size=1, max_size=3)


def _command(given: list[str]) -> tuple[dict[str, Any], CommandWork]:
    return {"command": given}, CommandWork(command=tuple(map(parsed, given)))


def _call(given: Any) -> tuple[dict[str, Any], CallWork]:
    return {"call": "a.b:c", "with": given}, CallWork(entry_point="a.b:c", given=_template(given))


def _target(given: Any) -> tuple[dict[str, Any], TargetWork]:
    return {"target": "t", "input": given}, TargetWork(target="t", input=_template(given))


def _template(given: Any) -> Template:
    return parsed_template(given)


works = st.one_of(arguments.map(_command), values.map(_call), values.map(_target))
terms = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(-(10**9), 10**9),
        "weight": st.integers(0, 100).map(float),
        "retries": st.integers(0, 99),
        "agent": names,
        "labels": st.dictionaries(names.filter(lambda n: n not in ("run", "step")), harmless),
    },
)


class Dumper(yaml.SafeDumper):
    """Writes texts plainly where they are words, and else in quotes."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = None if data.isalpha() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


Dumper.add_representer(str, Dumper.represent_str)


@st.composite
def written_steps(draw: st.DrawFn) -> tuple[list[dict[str, Any]], tuple[Step, ...]]:
    said: dict[str, Any]
    ids = draw(st.lists(names, min_size=1, max_size=4, unique_by=str.lower))
    files: list[dict[str, Any]] = []
    found: list[Step] = []
    for position, step_id in enumerate(ids):
        work_keys, work = draw(works)
        said = draw(terms)
        parents = draw(st.lists(st.sampled_from(ids[:position]), unique=True)) if position else []
        cents = draw(st.none() | st.integers(0, 10**6))
        items = draw(st.none() | st.lists(values, max_size=3))
        keys = {"id": step_id, **work_keys, **said, "depends_on": parents}
        keys |= {} if cents is None else {"cost_usd": cents / 100}
        keys |= {} if items is None else {"foreach": items}
        files.append(keys)
        found.append(
            Step(
                id=step_id,
                line=0,
                work=work,
                depends_on=tuple(parents),
                foreach=None if items is None else ListItems(values=tuple(items)),
                cost_micro_usd=None if cents is None else cents * 10_000,
                **said,
            )
        )
    return files, tuple(found)


@given(written_steps(), st.booleans(), st.integers(1, 99))
@settings(max_examples=60)
def test_what_was_written_is_what_is_read(
    steps_of: tuple[list[dict[str, Any]], tuple[Step, ...]], in_flow: bool, concurrency: int
) -> None:
    files, expected = steps_of
    document = {"config": {"concurrency": concurrency}, "steps": files}
    source = yaml.dump(document, Dumper=Dumper, default_flow_style=in_flow, allow_unicode=True)
    workflow = read_workflow(Path("eval.yaml"), source.encode())
    assert isinstance(workflow, Workflow)
    found = tuple(msgspec.structs.replace(step, line=0) for step in workflow.steps)
    assert (found, workflow.concurrency) == (expected, concurrency)


def test_a_template_that_cannot_be_parsed_is_not_written_by_these_tests() -> None:
    with pytest.raises(PlaceholderError):
        _template("{itm}")
