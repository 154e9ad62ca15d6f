"""A scope has one spelling, and a charge reaches it and everything above it."""

from __future__ import annotations

import random
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.budgets.scopes import (
    MAX_DEPTH,
    ROOT,
    Scope,
    ancestors,
    charged_scopes,
    depth,
    is_within,
    leaf_kind,
    leaf_name,
    parent,
    parse_scope,
    scope_words,
)
from headgate.errors import InvalidScopeError

SESSION = parse_scope("session:eval-1")
WORKFLOW = parse_scope("session:eval-1/workflow:w1")

PARTS = st.from_regex(r"[A-Za-z][a-z0-9_-]{0,5}:[A-Za-z0-9][A-Za-z0-9._@+-]{0,5}", fullmatch=True)
SCOPES = st.lists(PARTS, max_size=MAX_DEPTH).map("/".join).map(parse_scope)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("", ""),
        ("session:eval-2026-04-12", "session:eval-2026-04-12"),
        ("session:eval-1/workflow:w1", "session:eval-1/workflow:w1"),
        ("Session:Eval/WORKFLOW:W1", "session:Eval/workflow:W1"),
        ("project:42", "project:42"),
        ("user:ada@example.org", "user:ada@example.org"),
        ("cost_center-2:a.b_c+d-e", "cost_center-2:a.b_c+d-e"),
        ("k:" + "n" * 126, "k:" + "n" * 126),
        ("/".join(["a:b"] * 8), "/".join(["a:b"] * 8)),
    ],
)
def test_a_scope_is_brought_into_its_normal_form(text: str, normal: str) -> None:
    assert parse_scope(text) == normal


@pytest.mark.parametrize(
    "text",
    [
        "/",
        "session",
        "session:",
        ":eval",
        "session:a:b",
        "/session:a",
        "session:a/",
        "session:a//workflow:b",
        " session:a",
        "session:a b",
        "session: a",
        "session:{a}",
        "session:a*",
        "session:a%",
        "session:a'b",
        'session:a"b',
        "session:a\\b",
        "session:a\n",
        "session:ä",
        "session:.hidden",
        "9session:a",
        "k:" + "n" * 127,
        "/".join(["a:b"] * 9),
        "/".join(["k:" + "n" * 100] * 6),
        pytest.param("session:" + "a" * 100_000, id="far too long"),
    ],
)
def test_what_is_no_path_of_parts_is_refused_by_field(text: str) -> None:
    with pytest.raises(InvalidScopeError) as refusal:
        parse_scope(text, field="also[0]")

    assert refusal.value.field == "also[0]"
    assert len(str(refusal.value)) < 300


def test_a_missing_scope_is_not_the_root() -> None:
    with pytest.raises(InvalidScopeError, match="is a NoneType; write kind:name parts"):
        parse_scope(cast("str", None))


@pytest.mark.parametrize(
    ("text", "example"),
    [
        ("eval-1", "as in project:eval-1$"),
        ("session:a/eval-1", "as in project:eval-1$"),
        ("eval 1", "as in session:eval-1/workflow:w1"),
        ("a:", "as in session:eval-1/workflow:w1"),
    ],
)
def test_the_refusal_says_what_to_write_instead(text: str, example: str) -> None:
    with pytest.raises(InvalidScopeError, match=example):
        parse_scope(text)


def test_a_charge_reaches_the_root_first_and_the_scope_last() -> None:
    assert ancestors(WORKFLOW) == (ROOT, SESSION, WORKFLOW)
    assert ancestors(ROOT) == (ROOT,)


def test_further_scopes_join_by_depth_and_then_text() -> None:
    team = parse_scope("team:a")
    user = parse_scope("team:a/user:u")

    assert charged_scopes(WORKFLOW, [user, SESSION]) == (ROOT, SESSION, team, WORKFLOW, user)


def test_one_reservation_reaches_a_bounded_number_of_scopes() -> None:
    with pytest.raises(InvalidScopeError, match="also: one reservation reaches 71 scopes"):
        charged_scopes(ROOT, [parse_scope(f"task:t{number}") for number in range(70)])


def test_the_leaf_names_the_scope_among_its_siblings() -> None:
    assert (leaf_kind(WORKFLOW), leaf_name(WORKFLOW)) == ("workflow", "w1")
    assert (leaf_kind(ROOT), leaf_name(ROOT)) == ("", "")


@pytest.mark.parametrize(
    ("scope", "outer", "within"),
    [
        (WORKFLOW, SESSION, True),
        (WORKFLOW, WORKFLOW, True),
        (WORKFLOW, ROOT, True),
        (ROOT, ROOT, True),
        (SESSION, WORKFLOW, False),
        (ROOT, SESSION, False),
        (parse_scope("session:eval-10"), SESSION, False),
    ],
)
def test_a_scope_lies_within_its_ancestors_and_itself(
    scope: Scope, outer: Scope, within: bool
) -> None:
    assert is_within(scope, outer) is within


@given(SCOPES)
@settings(deadline=None, max_examples=50)
def test_the_normal_form_is_its_own_normal_form(scope: Scope) -> None:
    assert parse_scope(scope) == scope


@given(SCOPES)
@settings(deadline=None, max_examples=50)
def test_each_ancestor_is_the_parent_of_the_next(scope: Scope) -> None:
    reached = ancestors(scope)

    assert [depth(outer) for outer in reached] == list(range(depth(scope) + 1))
    assert [parent(inner) for inner in reached] == [None, *reached[:-1]]
    assert all(is_within(scope, outer) for outer in reached)


@given(SCOPES, st.lists(SCOPES, max_size=4), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_the_lock_order_does_not_depend_on_the_order_of_naming(
    scope: Scope, also: list[Scope], shuffler: random.Random
) -> None:
    named = [scope, *also]
    shuffler.shuffle(named)

    charged = charged_scopes(scope, also)
    assert charged == charged_scopes(named[0], named[1:])
    assert charged == charged_scopes(named[0], [*named, *charged])
    assert len(set(charged)) == len(charged)
    assert charged[0] == ROOT
    assert set(charged) == {outer for inner in named for outer in ancestors(inner)}


def test_the_root_has_a_name_for_people() -> None:
    assert scope_words(ROOT) == "the whole service"
    assert scope_words("session:s") == "session:s"
