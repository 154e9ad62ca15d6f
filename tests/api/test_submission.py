"""What clients send becomes a draft or a typed refusal, and never anything else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headgate.api.submission import (
    MAX_DEPTH,
    MAX_LABELS,
    MAX_PARENTS,
    MAX_SCOPES,
    TASK_FIELDS,
    Defaults,
    SubmissionParser,
)
from headgate.core import text
from headgate.core.task import (
    MAX_ATTEMPT_SECONDS,
    MAX_ATTEMPTS,
    NO_JSON,
    Draft,
    OnExhausted,
    OnParentFailure,
    TaskRecord,
    TaskStatus,
)
from headgate.core.task_view import snapshot_of
from headgate.core.text import SLICE_BYTES, Steps, at_once
from headgate.errors import InvalidScopeError, InvalidTaskError

NOW = 1_800_000_000.0
LEAST = {"agentId": "a", "action": "click"}


def submission_parser(**defaults: object) -> SubmissionParser:
    return SubmissionParser(
        projects=["search", "Web.2"],
        targets={"browser": None, "claude": "work", "chat": None},
        target_providers={"chat": "zai"},
        slots={"home": "zai", "office": "openai"},
        default_target="browser",
        defaults=msgspec.convert(defaults, Defaults),
    )


INTAKE = submission_parser()


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def read(**fields: object) -> Draft:
    return INTAKE.read_task(json.dumps(LEAST | fields).encode(), now=NOW)


def refused(body: bytes | Mapping[str, object]) -> InvalidTaskError:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidTaskError) as caught:
        INTAKE.read_task(sent, now=NOW)
    return caught.value


def test_the_least_task_gets_all_defaults() -> None:
    task, terms, submission = read()
    assert (task.id, task.status, task.agent_id) == ("", TaskStatus.QUEUED, "a")
    assert (task.project_id, task.scopes) == ("default", ("project:default",))
    assert (task.target, task.slot) == ("browser", None)
    assert (task.priority, task.weight, task.estimate_tokens) == (0, 1.0, None)
    assert (task.created_at, task.deadline, task.not_before) == (NOW, None, None)
    assert terms.attempt_seconds == 3_600
    assert (terms.max_attempts, terms.estimate_micro_usd, terms.depends_on) == (1, None, ())
    assert (submission.action, submission.params, submission.labels) == ("click", NO_JSON, {})


def test_everything_that_a_client_may_say_is_kept() -> None:
    parent = "tsk_0123456789abcdefghjkmnpqrs"
    task, terms, submission = read(
        tabId="t",
        selector="#a\n.b",
        ref="e5",
        params={"text": "x"},
        priority=-3,
        deadline=at(NOW + 60),
        callbackUrl="https://example.com/hook?x=1",
        projectId="search",
        target="claude",
        input=[1, {"a": None}],
        weight=2,
        estimate={"tokens": 500, "usd": "0.0000005"},
        scopes=["session:eval-1/workflow:w1", "Project:search", ""],
        dependsOn=[parent, parent],
        onParentFailure="run",
        notBefore=at(NOW + 5),
        labels={"team": "x"},
        maxAttempts=3,
        timeoutSeconds=2.5,
        onExhausted="reject",
    )
    assert (task.priority, task.deadline, task.not_before) == (-3, NOW + 60, NOW + 5)
    assert (task.project_id, task.target, task.slot) == ("search", "claude", "work")
    assert task.scopes == ("project:search", "session:eval-1/workflow:w1")
    assert (task.weight, task.estimate_tokens, terms.estimate_micro_usd) == (2.0, 500, 1)
    assert (terms.depends_on, terms.max_attempts) == ((parent,), 3)
    assert terms.attempt_seconds == 2.5
    assert terms.on_parent_failure is OnParentFailure.RUN
    assert terms.on_exhausted is OnExhausted.REJECT
    assert submission.params is not None
    assert bytes(submission.params) == b'{"text": "x"}'
    assert submission.input is not None
    assert bytes(submission.input) == b'[1, {"a": null}]'
    assert (submission.tab_id, submission.ref, submission.selector) == ("t", "e5", "#a\n.b")
    assert terms.callback_url == "https://example.com/hook?x=1"
    assert submission.labels == {"team": "x"}


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({"action": "x"}, "missing_field", "missing required field 'agentId'"),
        ({"agentId": "", "action": "x"}, "missing_field", "missing required field 'agentId'"),
        ({}, "missing_field", "missing required field 'agentId'"),
        ({"agentId": "a"}, "missing_field", "missing required field 'action'"),
        ({"agentId": "a", "input": None}, "missing_field", "missing required field 'action'"),
        (LEAST | {"deadline": at(NOW)}, "invalid_field", "deadline is in the past"),
        (LEAST | {"deadline": "tomorrow"}, "invalid_field", "invalid deadline format"),
        (LEAST | {"deadline": "2026-01-01"}, "invalid_field", "invalid deadline format"),
        (LEAST | {"projectId": "x"}, "unknown_project", "unknown project 'x'"),
        (LEAST | {"target": "x"}, "unknown_target", "unknown target 'x'"),
        (LEAST | {"slot": "work"}, "unknown_slot", "unknown slot 'work'"),
        (
            LEAST | {"provider": "anthropic"},
            "unknown_provider",
            "unknown provider 'anthropic': no slot has it",
        ),
        (
            LEAST | {"slot": "home", "provider": "zai"},
            "invalid_field",
            "field 'provider': cannot be named beside a slot; leave one of them out",
        ),
    ],
)
def test_refusals_that_clients_compare_are_exact(
    body: dict[str, object], code: str, message: str
) -> None:
    error = refused(body)
    assert (error.code, str(error)) == (code, message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("agentId", "a" * 129),
        ("agentId", "a\nb"),
        ("agentId", " a"),
        ("agentId", 5),
        ("action", "x\0"),
        ("tabId", "t" * 129),
        ("selector", "x" * 4097),
        ("selector", "\0"),
        ("ref", "\x7f"),
        ("params", []),
        ("params", "text"),
        ("params", 5),
        ("priority", 10**9 + 1),
        ("priority", 1.5),
        ("priority", True),
        ("priority", 10**30),
        ("deadline", 5),
        ("deadline", "9999-12-31T23:59:59-23:59"),
        ("deadline", "9999-12-31T23:59:59Z"),
        ("callbackUrl", "ftp://example.com"),
        ("callbackUrl", "file:///etc/passwd"),
        ("callbackUrl", "http://"),
        ("callbackUrl", "http:///path"),
        ("callbackUrl", "https://user:pw@example.com/"),
        ("callbackUrl", "https://example.com/a b"),
        ("callbackUrl", "https://example.com/" + "x" * 2048),
        ("weight", -1),
        ("weight", 1e10),
        ("weight", "heavy"),
        ("estimate", 5),
        ("estimate", {"tokens": -1}),
        ("estimate", {"tokens": 10**13}),
        ("estimate", {"usd": -0.01}),
        ("estimate", {"usd": 1e9}),
        ("estimate", {"usd": "many"}),
        ("estimate", {"cents": 5}),
        ("scopes", "session:a"),
        ("scopes", ["no scope"]),
        ("scopes", [f"session:{n}" for n in range(MAX_SCOPES + 1)]),
        ("scopes", ["/".join(f"k{n}:x{m}" for n in range(8)) for m in range(10)]),
        ("scopes", ["project:search"]),
        ("dependsOn", [""]),
        ("dependsOn", ["x"] * (MAX_PARENTS + 1)),
        ("onParentFailure", "explode"),
        ("onExhausted", 3),
        ("notBefore", "soon"),
        ("notBefore", "9999-12-31T23:59:59Z"),
        ("labels", {"": "x"}),
        ("labels", {"k" * 65: "x"}),
        ("labels", {"k": "x" * 257}),
        ("labels", {"k": 5}),
        ("labels", {str(n): "" for n in range(MAX_LABELS + 1)}),
        ("maxAttempts", 0),
        ("maxAttempts", MAX_ATTEMPTS + 1),
        ("timeoutSeconds", 0),
        ("timeoutSeconds", -1.5),
        ("timeoutSeconds", MAX_ATTEMPT_SECONDS + 1),
        ("timeoutSeconds", "30s"),
    ],
)
def test_a_value_outside_its_bounds_is_refused_by_its_field(field: str, value: object) -> None:
    error = refused(LEAST | {field: value})
    assert error.code == "invalid_field"
    assert error.field.startswith(field)


@pytest.mark.parametrize("field", TASK_FIELDS)
def test_null_is_the_same_as_absent(field: str) -> None:
    if field in LEAST:
        assert refused(LEAST | {field: None}).code == "missing_field"
    else:
        assert read(**{field: None}) == read()


@pytest.mark.parametrize("field", ["tabId", "selector", "ref", "deadline", "projectId", "target"])
def test_an_empty_text_is_the_same_as_absent(field: str) -> None:
    assert read(**{field: ""}) == read()


def test_an_open_task_needs_a_project_and_may_be_input_alone() -> None:
    draft = INTAKE.read_task(b'{"projectId": "search", "input": 5}', now=NOW)
    assert (draft.task.agent_id, draft.task.project_id) == (None, "search")
    assert (draft.submission.action, draft.submission.input) == ("", msgspec.Raw(b"5"))


def test_a_start_after_the_deadline_is_refused_and_one_in_the_past_is_now() -> None:
    body = LEAST | {"deadline": at(NOW + 5), "notBefore": at(NOW + 5)}
    assert refused(body).field == "notBefore"
    assert read(notBefore=at(NOW - 5)).task.not_before is None


def test_a_task_that_starts_later_has_its_whole_time_from_then_on() -> None:
    judge = submission_parser(deadline_seconds=900.0)
    later = json.dumps(LEAST | {"notBefore": at(NOW + 3600)}).encode()
    assert judge.read_task(later, now=NOW).task.deadline == NOW + 3600 + 900


def test_a_task_has_a_deadline_only_where_it_or_the_settings_say_so() -> None:
    least = json.dumps(LEAST).encode()
    assert INTAKE.read_task(least, now=NOW).task.deadline is None
    judge = submission_parser(deadline_seconds=900.0)
    draft = judge.read_task(least, now=NOW)
    assert draft.task.deadline == NOW + 900
    record = TaskRecord(task=draft.task, terms=draft.terms, submission=draft.submission)
    assert judge.again(record, now=NOW + 50).task.deadline == NOW + 50 + 900
    assert INTAKE.again(record, now=NOW + 50).task.deadline is None
    own = json.dumps(LEAST | {"deadline": at(NOW + 60)}).encode()
    assert judge.read_task(own, now=NOW).task.deadline == NOW + 60


@pytest.mark.parametrize("fields", [{}, {"maxAttempts": 3}])
def test_an_attempt_has_the_time_of_the_settings_unless_the_task_says(
    fields: dict[str, object],
) -> None:
    judge = submission_parser(attempt_seconds=7_200.0)
    draft = judge.read_task(json.dumps(LEAST | fields).encode(), now=NOW)
    assert draft.terms.attempt_seconds == 7_200.0
    own = json.dumps(LEAST | fields | {"timeoutSeconds": 5}).encode()
    assert judge.read_task(own, now=NOW).terms.attempt_seconds == 5


def test_defaults_hold_where_nothing_else_was_said() -> None:
    given_defaults = submission_parser(max_attempts=4)
    task, terms, _ = given_defaults.read_task(json.dumps(LEAST).encode(), now=NOW)
    assert (task.estimate_tokens, terms.estimate_micro_usd, terms.max_attempts) == (None, None, 4)
    body = LEAST | {"estimate": {"tokens": 0}, "maxAttempts": 2}
    task, terms, _ = given_defaults.read_task(json.dumps(body).encode(), now=NOW)
    assert (task.estimate_tokens, terms.estimate_micro_usd, terms.max_attempts) == (0, None, 2)


@pytest.mark.parametrize("seconds", [0.001, 30, MAX_ATTEMPT_SECONDS])
def test_the_time_of_an_attempt_is_kept_and_goes_with_a_retry(seconds: float) -> None:
    judge = submission_parser()
    draft = judge.read_task(json.dumps(LEAST | {"timeoutSeconds": seconds}).encode(), now=NOW)
    assert draft.terms.attempt_seconds == seconds
    record = TaskRecord(task=draft.task, terms=draft.terms, submission=draft.submission)
    assert judge.again(record, now=NOW).terms.attempt_seconds == seconds


@pytest.mark.parametrize(("usd", "micro_usd"), [("0.07", 70_000), (0.07, 70_000), (0, 0)])
def test_a_fixed_cost_is_kept_and_goes_with_a_retry(usd: float | str, micro_usd: int) -> None:
    judge = submission_parser()
    body = json.dumps(LEAST | {"costUsd": usd}).encode()
    draft = judge.read_task(body, now=NOW, is_trusted=True)
    assert (draft.terms.cost_micro_usd, draft.terms.estimate_micro_usd) == (micro_usd, None)
    record = TaskRecord(task=draft.task, terms=draft.terms, submission=draft.submission)
    assert judge.again(record, now=NOW, is_trusted=True).terms.cost_micro_usd == micro_usd
    assert snapshot_of(record).cost_usd == micro_usd / 1e6


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"costUsd": -1}, "field 'costUsd': must not be negative"),
        ({"costUsd": "many"}, "field 'costUsd': "),
        ({"costUsd": 1, "estimate": {"usd": 1}}, "field 'costUsd': cannot be named beside"),
    ],
)
def test_a_cost_that_cannot_be_held_is_refused(given: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidTaskError, match=f"^{problem}"):
        submission_parser().read_task(json.dumps(LEAST | given).encode(), now=NOW)


def test_tokens_may_be_estimated_beside_a_fixed_cost() -> None:
    body = LEAST | {"costUsd": 1, "estimate": {"tokens": 5}}
    judge = submission_parser()
    task, terms, _ = judge.read_task(json.dumps(body).encode(), now=NOW, is_trusted=True)
    assert (task.estimate_tokens, terms.cost_micro_usd) == (5, 1_000_000)


CLAIMED = LEAST | {"costUsd": 1, "weight": 0, "estimate": {"tokens": 5}}


def test_what_a_token_states_without_admin_is_a_claim_and_its_cost_an_estimate() -> None:
    judge = submission_parser()
    batch = json.dumps({"agentId": "a", "tasks": [CLAIMED]}).encode()
    for draft in (
        judge.read_task(json.dumps(CLAIMED).encode(), now=NOW),
        judge.read_batch(batch, now=NOW).entries[0],
    ):
        assert isinstance(draft, Draft)
        assert draft.task.has_claims
        assert not draft.task.has_usd_estimate
        assert (draft.terms.cost_micro_usd, draft.terms.estimate_micro_usd) == (None, 1_000_000)


def test_a_target_that_trusts_costs_has_them_from_anybody() -> None:
    judge = SubmissionParser(targets={"x": None}, default_target="x", cost_targets=("x",))
    task, terms, _ = judge.read_task(json.dumps(CLAIMED).encode(), now=NOW)
    assert (task.has_claims, task.has_usd_estimate) == (True, True)
    assert (terms.cost_micro_usd, terms.estimate_micro_usd) == (1_000_000, None)


@pytest.mark.parametrize(
    ("first", "second", "has_claims", "cost"),
    [
        (True, True, False, 1_000_000),
        (True, False, True, None),
        (False, True, True, None),
        (False, False, True, None),
    ],
)
def test_a_retry_is_trusted_where_both_of_its_senders_are(
    first: bool, second: bool, has_claims: bool, cost: int | None
) -> None:
    judge = submission_parser()
    draft = judge.read_task(json.dumps(CLAIMED).encode(), now=NOW, is_trusted=first)
    record = TaskRecord(task=draft.task, terms=draft.terms, submission=draft.submission)
    again = judge.again(record, now=NOW, is_trusted=second)
    assert (again.task.has_claims, again.terms.cost_micro_usd) == (has_claims, cost)


def test_a_target_must_be_named_where_none_is_the_default() -> None:
    strict = SubmissionParser(targets={"x": None}, default_target=None)
    with pytest.raises(InvalidTaskError, match="missing required field 'target'"):
        strict.read_task(json.dumps(LEAST).encode(), now=NOW)


def test_a_project_whose_name_cannot_be_a_scope_is_refused_at_once() -> None:
    with pytest.raises(InvalidScopeError):
        SubmissionParser(projects=["a b"], targets={}, default_target=None)


@pytest.mark.parametrize("name", ["traceId", "x", "metadata", "id", "", "timeout", "n" * 5000])
def test_a_field_that_nobody_knows_is_passed_over(name: str) -> None:
    assert read(**{name: 1}) == read()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("dedline", "deadline"),
        ("agent_id", "agentId"),
        ("callback-url", "callbackUrl"),
        ("DEPENDSON", "dependsOn"),
        ("maxAttempt", "maxAttempts"),
        ("project", "projectId"),
    ],
)
def test_a_field_that_is_almost_known_is_refused_with_the_known_one(name: str, meant: str) -> None:
    error = refused(LEAST | {name: "x"})
    assert (error.code, error.field) == ("unknown_field", name)
    assert f"did you mean {meant}?" in str(error)


def test_a_flood_of_unknown_fields_is_refused_without_looking_at_each() -> None:
    assert refused(LEAST | {f"f{n}": n for n in range(5000)}).code == "unknown_field"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"{}x",
        b'{"agentId": NaN}',
        b'{"agentId": "\xff"}',
        b'{"agentId": "\\ud800"}',
        b'{"x": ' * 100_000,
        b'{"agentId": "a", "params": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"tasks": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
)
def test_what_is_not_a_json_object_is_refused_as_such(body: bytes) -> None:
    assert refused(body).code == "bad_json"


@pytest.mark.parametrize(
    "value",
    [b'"\xff"', b"1e999", b"9" * 5000, b"[" * 65 + b"]" * 65, b'{"a":' * 65 + b"1" + b"}" * 65],
)
def test_json_that_some_reader_could_not_read_is_refused(value: bytes) -> None:
    error = refused(b'{"agentId": "a", "action": "x", "input": ' + value + b"}")
    assert (error.code, error.field) == ("invalid_field", "input")


def test_nesting_within_the_bound_and_many_small_lists_are_fine() -> None:
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    wide = b"[" + b",".join([b"[]"] * 1000) + b"]"
    for value in (deepest, wide):
        body = b'{"agentId": "a", "action": "x", "input": ' + value + b"}"
        kept = INTAKE.read_task(body, now=NOW).submission.input
        assert kept is not None
        assert bytes(kept) == value


def test_the_last_of_two_equal_keys_counts() -> None:
    body = b'{"agentId": "a", "agentId": "b", "action": "x"}'
    assert INTAKE.read_task(body, now=NOW).task.agent_id == "b"


def batch(body: dict[str, object]) -> list[Draft | InvalidTaskError]:
    return INTAKE.read_batch(json.dumps(body).encode(), now=NOW).entries


def test_tasks_of_a_batch_share_what_the_batch_says_and_may_say_otherwise() -> None:
    first, second = batch(
        {
            "agentId": "a",
            "callbackUrl": "http://h/",
            "projectId": "search",
            "tasks": [{"action": "x"}, {"action": "y", "agentId": "b", "projectId": "default"}],
        }
    )
    assert isinstance(first, Draft)
    assert isinstance(second, Draft)
    assert (first.task.agent_id, first.task.project_id) == ("a", "search")
    assert first.terms.callback_url == "http://h/"
    assert (second.task.agent_id, second.task.project_id) == ("b", "default")


def test_a_wrong_task_of_a_batch_is_refused_by_itself() -> None:
    entries = batch({"agentId": "a", "tasks": [{"action": "x"}, {}, 5, {"action": "x", "ref": 5}]})
    assert isinstance(entries[0], Draft)
    codes = [entry.code for entry in entries[1:] if isinstance(entry, InvalidTaskError)]
    assert codes == ["missing_field", "bad_json", "invalid_field"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"tasks": [{}]}, "missing_field"),
        ({"agentId": "a"}, "batch_empty"),
        ({"agentId": "a", "tasks": []}, "batch_empty"),
        ({"agentId": "a", "tasks": [{}] * 51}, "batch_too_large"),
        ({"agentId": "a", "tasks": {}}, "invalid_field"),
        ({"agentId": "a", "task": []}, "unknown_field"),
    ],
)
def test_a_batch_that_is_wrong_as_a_whole_is_refused_as_a_whole(
    body: dict[str, object], code: str
) -> None:
    with pytest.raises(InvalidTaskError) as caught:
        batch(body)
    assert caught.value.code == code


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from([*TASK_FIELDS, "tasks"]) | st.text(max_size=9), JSON).map(
    lambda body: json.dumps(LEAST | body, ensure_ascii=False).encode("utf-8", "surrogatepass")
)


@settings(deadline=None, max_examples=300)
@given(st.binary() | BODIES)
@example(b'{"agentId": "a", "action": "x", "scopes": ["session:a", "session:a"]}')
def test_any_bytes_give_a_draft_or_the_typed_refusal(body: bytes) -> None:
    for read_body in (INTAKE.read_task, INTAKE.read_batch):
        error = refusal_from(read_body, body)
        assert error is None or (error.code and len(str(error)) < 500)


def refusal_from(read_body: Callable[..., object], body: bytes) -> InvalidTaskError | None:
    try:
        read_body(body, now=NOW)
    except InvalidTaskError as error:
        return error
    return None


@settings(deadline=None, max_examples=200)
@given(BODIES)
def test_what_is_taken_can_be_stored_and_read_again(body: bytes) -> None:
    try:
        draft = INTAKE.read_task(body, now=NOW)
    except InvalidTaskError:
        return
    stored = msgspec.json.encode(draft)
    assert b"\0" not in stored
    assert msgspec.json.decode(stored)


def test_an_address_that_may_not_be_told_is_refused_by_its_field() -> None:
    guarded = SubmissionParser(
        targets={"browser": None},
        default_target="browser",
        check_url=lambda url: "may not be reached" if "10.0.0.1" in url else None,
    )
    fine, bad = "https://hooks.example/", "http://10.0.0.1/"
    body = json.dumps(LEAST | {"callbackUrl": fine}).encode()
    assert guarded.read_task(body, now=NOW).terms.callback_url == fine
    with pytest.raises(InvalidTaskError, match="field 'callbackUrl': may not be reached"):
        guarded.read_task(json.dumps(LEAST | {"callbackUrl": bad}).encode(), now=NOW)
    batch = {"agentId": "a", "callbackUrl": bad, "tasks": [LEAST, LEAST | {"callbackUrl": fine}]}
    first, second = guarded.read_batch(json.dumps(batch).encode(), now=NOW).entries
    assert isinstance(first, InvalidTaskError)
    assert isinstance(second, Draft)


SLOTS: list[tuple[dict[str, object], tuple[str | None, str | None], bool]] = [
    ({}, (None, None), False),
    ({"target": "claude"}, ("work", None), False),
    ({"target": "chat"}, (None, "zai"), False),
    ({"slot": "home"}, ("home", None), True),
    ({"provider": "openai"}, (None, "openai"), True),
    ({"target": "claude", "slot": "home"}, ("home", None), True),
    ({"target": "claude", "provider": "zai"}, (None, "zai"), True),
    ({"target": "chat", "slot": "office"}, ("office", None), True),
    ({"target": "chat", "provider": "openai"}, (None, "openai"), True),
    ({"target": "chat", "slot": "", "provider": None}, (None, "zai"), False),
]


@pytest.mark.parametrize(("fields", "way", "is_own"), SLOTS)
def test_a_task_says_its_slot_or_provider_and_otherwise_its_target_does(
    fields: dict[str, object], way: tuple[str | None, str | None], *, is_own: bool
) -> None:
    task, terms, _ = read(**fields)
    assert (task.slot, task.provider) == way
    assert terms.names_slot is is_own


@pytest.mark.parametrize(("fields", "way", "is_own"), SLOTS)
def test_a_task_that_is_done_again_keeps_its_own_word_and_asks_its_target_otherwise(
    fields: dict[str, object], way: tuple[str | None, str | None], *, is_own: bool
) -> None:
    draft = read(**fields)
    record = TaskRecord(task=draft.task, terms=draft.terms, submission=draft.submission)
    moved = SubmissionParser(
        targets={"browser": "other", "claude": "other", "chat": "other"},
        default_target="browser",
        slots={"home": "zai", "office": "openai"},
    )
    again = moved.again(record, now=NOW)
    assert (again.task.slot, again.task.provider) == (way if is_own else ("other", None))


def test_a_task_whose_slot_left_the_file_cannot_be_done_again() -> None:
    draft = read(slot="home")
    record = TaskRecord(task=draft.task, terms=draft.terms, submission=draft.submission)
    without = SubmissionParser(targets={"browser": None}, default_target="browser")
    with pytest.raises(InvalidTaskError) as caught:
        without.again(record, now=NOW)
    assert (caught.value.code, caught.value.field) == ("unknown_slot", "slot")


MEGABYTE = 1024 * 1024 - 400
LARGE: dict[str, bytes] = {
    "lists of lists": b"[" + b",".join([b"["  * 60 + b"]" * 60] * (MEGABYTE // 121)) + b"]",
    "empty lists": b"[" + b"[]," * (MEGABYTE // 3) + b"[]]",
    "empty objects": b"[" + b"{}," * (MEGABYTE // 3) + b"{}]",
    "ones": b"[" + b"1," * (MEGABYTE // 2) + b"1]",
    "small numbers": b"[" + b"1.2345678901234567e-300," * (MEGABYTE // 24) + b"1]",
    "large numbers": b"[" + b"1e100," * (MEGABYTE // 6) + b"1]",
    "empty strings": b"[[]" + b',""' * (MEGABYTE // 3) + b"]",
    "brackets in a string": b'["' + b"[" * MEGABYTE + b'"]',
    "escaped quotes": b'["' + b'\\"[' * (MEGABYTE // 3) + b'"]',
    "backslashes": b'["' + b"\\\\" * (MEGABYTE // 2) + b'",[]]',
    "keys": b"{" + b",".join(b'"%x":1' % n for n in range(MEGABYTE // 10)) + b"}",
}  # fmt: skip


def longest_step(steps: Steps[Any]) -> tuple[int, float]:
    """Return how many steps there were, and the processor time of the longest."""
    count, longest = 0, 0.0
    while True:
        began = time.process_time()
        is_over = next(steps, steps) is steps
        longest = max(longest, time.process_time() - began)
        count += 1
        if is_over:
            return count, longest


@pytest.mark.parametrize("name", LARGE)
def test_a_megabyte_of_any_json_is_judged_in_short_steps(name: str) -> None:
    """To decode one took up to 400 ms, in which nobody else was served."""
    body = b'{"agentId": "a", "input": ' + LARGE[name] + b"}"
    count, longest = longest_step(INTAKE.task_steps(body, now=NOW))
    # What has many brackets goes in slices; most else is looked over once, which is fast.
    if name in {"lists of lists", "empty lists", "empty objects", "large numbers"}:
        assert count > MEGABYTE // SLICE_BYTES
    assert longest < 0.1, f"a step took {longest * 1000:.0f} ms"
    assert bytes(INTAKE.read_task(body, now=NOW).submission.input) == LARGE[name]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"[" * 64 + b"]" * 64, "deeper than 64 levels"),
        (b"[" * 500_000, "nested too deeply"),
        (b"1e309", "out of range"),
        (b"-1E+0400", "out of range"),
        (b"9" * 5_000, "out of range"),
        (b"9" * 100_000, "too many digits"),
        (b'"\xff"', "decode byte 0xff"),
    ],
)
def test_large_json_that_some_reader_could_not_read_is_refused(value: bytes, problem: str) -> None:
    for filler in (b"x" * 70_000, b'\\"[[' * 20_000, b"\\\\" * 40_000):
        given = b'["%b", %b]' % (filler, value)
        error = refused(b'{"agentId": "a", "action": "x", "input": ' + given + b"}")
        assert problem in str(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None)
@given(
    values=st.lists(json_values, min_size=1, max_size=5),
    depth=st.integers(min_value=0, max_value=8),
    slice_bytes=st.integers(min_value=1, max_value=64),
    levels=st.integers(min_value=1, max_value=8),
    is_ascii=st.booleans(),
)
def test_json_is_judged_in_slices_as_it_is_when_it_is_decoded(
    values: list[Any], depth: int, slice_bytes: int, levels: int, is_ascii: bool
) -> None:
    written = json.dumps([*values, 1e200], ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    sent = b"[" * depth + written + b"]" * depth

    def judged(decoded_bytes: int) -> str:
        with (
            patch.object(text, "DECODED_BYTES", decoded_bytes),
            patch.object(text, "SLICE_BYTES", slice_bytes),
        ):
            try:
                at_once(text.json_steps(sent, levels=levels))
            except UnicodeDecodeError:
                return "text"
            except text.DeepJsonError as error:
                return str(error)
        return ""

    try:
        msgspec.json.decode(sent, type=msgspec.Raw)
    except msgspec.DecodeError:
        return
    assert judged(0) == judged(len(sent))


PILES: list[tuple[str, bytes, str]] = [
    ("tasks", b'{"agentId": "a", "tasks": [' + b"{}," * 300_000 + b"{}]}", "batch_too_large"),
    ("scopes", b'{"agentId": "a", "scopes": [' + b'"",' * 300_000 + b'""]}', "body_too_large"),
    ("fields", LARGE["keys"], "body_too_large"),
]


@pytest.mark.parametrize(("name", "body", "code"), PILES, ids=[one[0] for one in PILES])
def test_piles_of_small_values_are_refused_before_they_are_parsed(
    name: str, body: bytes, code: str
) -> None:
    for read in (INTAKE.read_task, INTAKE.read_batch):
        with pytest.raises(InvalidTaskError) as raised:
            read(body, now=NOW)
        assert raised.value.code == code, name


KEPT = {
    "targets": {"browser": None, "claude": "work", "chat": None},
    "target_providers": {"chat": "zai"},
    "default_target": "browser",
    "projects": ("evals", "web"),
    "slots": {"work": "zai", "home": "openai"},
    "slot_projects": {"work": frozenset({"evals"})},
}


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"slot": "work"}, ("unknown_slot", "slot")),
        ({"provider": "zai"}, ("unknown_provider", "provider")),
        ({"target": "claude"}, ("unknown_slot", "target")),
        ({"target": "chat"}, ("unknown_slot", "target")),
        ({"slot": "home"}, None),
        ({"provider": "openai"}, None),
        ({"target": "claude", "slot": "home"}, None),
        ({}, None),
    ],
)
def test_a_slot_is_named_only_by_the_projects_that_it_is_for(
    fields: dict[str, object], refusal: tuple[str, str] | None
) -> None:
    kept = SubmissionParser(**KEPT)  # type: ignore[arg-type]
    own = kept.read_task(json.dumps(LEAST | {"projectId": "evals"} | fields).encode(), now=NOW)
    record = TaskRecord(task=own.task, terms=own.terms, submission=own.submission)
    assert kept.again(record, now=NOW).task.slot == own.task.slot
    body = json.dumps(LEAST | {"projectId": "web"} | fields).encode()
    given_away = SubmissionParser(**(KEPT | {"slot_projects": {"work": frozenset({"web"})}}))  # type: ignore[arg-type]
    if refusal is None:
        kept.read_task(body, now=NOW)
        given_away.again(record, now=NOW)
        return
    with pytest.raises(InvalidTaskError) as sent:
        kept.read_task(body, now=NOW)
    with pytest.raises(InvalidTaskError) as retried:
        given_away.again(record, now=NOW)
    assert {(one.value.code, one.value.field) for one in (sent, retried)} == {refusal}


def test_a_slot_that_a_project_may_not_name_is_refused_like_one_that_is_not_there() -> None:
    kept = SubmissionParser(**KEPT)  # type: ignore[arg-type]
    lines = []
    for name in ("work", "nowhere"):
        body = json.dumps(LEAST | {"projectId": "web", "slot": name}).encode()
        with pytest.raises(InvalidTaskError) as caught:
            kept.read_task(body, now=NOW)
        lines.append(str(caught.value).replace(name, "it"))
    assert lines[0] == lines[1]
