"""TokenStore: what is kept of one, which is the first, what ends it, and how many there may be."""

from __future__ import annotations

import pickle
import re
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.budgets.scopes import Scope
from headgate.errors import InvalidFieldError, LimitReachedError, NameTakenError
from headgate.storage import tokens as token_rows
from headgate.storage.audit import Actor, AuditEntry, AuditLog
from headgate.storage.tokens import (
    MAX_TOKENS,
    PERMISSIONS,
    Bounds,
    KeptToken,
    NewToken,
    Permission,
    TokenStore,
    hash_of,
    new_token,
    read_token,
)
from headgate.storage.transaction import Transaction
from storage.scene import Place

ALL = PERMISSIONS


def made(
    name: str = "ci",
    permissions: tuple[Permission, ...] = ("submit", "read"),
    *,
    now: float = 100.0,
    bounds: Bounds | None = None,
    expires_at: float | None = None,
) -> NewToken:
    return new_token(
        name=name,
        permissions=permissions,
        now=now,
        bounds=bounds or Bounds(),
        expires_at=expires_at,
    )


def test_the_text_of_a_token_has_its_id_and_at_least_160_random_bits() -> None:
    new = made()
    assert re.fullmatch(r"hg_[0-9a-f]{12}_[0-9a-f]{40,}", new.text)
    token_id, secret = read_token(new.text) or ("", "")
    assert token_id == new.kept.token.id
    assert new.kept.is_opened_by(secret)
    assert not new.kept.is_opened_by(secret[:-1] + "x")
    assert secret not in repr(new.kept)
    assert len({made().text for _ in range(100)}) == 100


@pytest.mark.parametrize("text", ["", "hg_", "hg_a_b", " ", "hg_" + "0" * 12 + "_" + "g" * 48])
def test_what_is_no_token_is_not_read_as_one(text: str) -> None:
    assert read_token(text) is None


@settings(deadline=None)
@given(text=st.text(max_size=80))
def test_no_text_raises(text: str) -> None:
    assert read_token(text) is None or text.startswith("hg_")


@pytest.mark.parametrize("name", ["", " ci", "ci ", "a\nb", "x" * 65])
def test_a_name_that_cannot_be_shown_is_refused(name: str) -> None:
    with pytest.raises(InvalidFieldError, match="name"):
        made(name)


def test_a_token_without_permissions_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="permissions"):
        made(permissions=())


@pytest.mark.parametrize("bounds", [Bounds(agent_id="a"), Bounds(project_id="p")])
def test_whoever_administers_is_not_bound(bounds: Bounds) -> None:
    with pytest.raises(InvalidFieldError, match="admin is for the whole service"):
        made(permissions=ALL, bounds=bounds)


def test_a_time_that_is_over_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="expiresAt"):
        made(now=100.0, expires_at=100.0)


@pytest.mark.parametrize(
    ("bounds", "scope", "may"),
    [
        (Bounds(), "", True),
        (Bounds(), "project:q", True),
        (Bounds(project_id="p"), "", False),
        (Bounds(project_id="p"), "project:p", True),
        (Bounds(project_id="p"), "project:p/session:s", True),
        (Bounds(project_id="p"), "project:pq", False),
        (Bounds(project_id="p"), "session:s/project:p", False),
        (Bounds(agent_id="a"), "project:p", False),
        (Bounds(agent_id="a"), "agent:a", True),
        (Bounds(agent_id="a"), "project:p/agent:a/session:s", True),
        (Bounds(agent_id="a"), "project:p/agent:ab", False),
        (Bounds(agent_id="a", project_id="p"), "project:p/agent:a", True),
        (Bounds(agent_id="a", project_id="p"), "project:q/agent:a", False),
        (Bounds(agent_id="a", project_id="p"), "project:p", False),
    ],
)
def test_which_budgets_are_ones_own(bounds: Bounds, scope: str, may: bool) -> None:
    assert bounds.may_charge(Scope(scope)) is may
    assert bounds.own_scope is not None
    assert bounds.may_charge(bounds.own_scope)


@pytest.mark.parametrize("name", ["Lead Reviewer", "a/b", "ü", "a" * 200])
def test_an_agent_whose_name_is_no_part_of_a_scope_has_no_budget_of_its_own(name: str) -> None:
    assert Bounds(agent_id=name).own_scope is None
    assert Bounds(agent_id=name, project_id="p").own_scope is None


async def test_what_was_kept_comes_back_without_its_secret(place: Place) -> None:
    async with place.scene() as scene:
        tokens = TokenStore(scene.store)
        bounds = Bounds(agent_id="a", project_id="p", least_priority=-3)
        new = made(now=scene.clock(), bounds=bounds, expires_at=scene.clock() + 60)
        await tokens.add(new.kept)
        assert await tokens.get(new.kept.token.id) == new.kept
        assert await tokens.list() == [new.kept.token]
        assert await tokens.get("0" * 12) is None


async def test_only_the_first_token_of_a_store_is_the_first(place: Place) -> None:
    async with place.scene() as scene:
        tokens = TokenStore(scene.store)
        first, second = made("first", ALL), made("second", ALL)
        assert await tokens.create_first(first.kept)
        # A reply that got lost is asked for again.
        assert await tokens.create_first(first.kept)
        assert not await tokens.create_first(second.kept)
        await tokens.revoke(first.kept.token.id)
        assert not await tokens.create_first(second.kept)
        assert [token.name for token in await tokens.list()] == ["first"]


async def test_a_token_that_was_revoked_stays_so(place: Place) -> None:
    async with place.scene() as scene:
        tokens = TokenStore(scene.store)
        new = made(now=scene.clock())
        await tokens.add(new.kept)
        revoked = await tokens.revoke(new.kept.token.id)
        assert revoked is not None
        assert revoked.revoked_at == scene.clock()
        assert not revoked.is_good(scene.clock())
        scene.clock.advance(5.0)
        assert await tokens.revoke(new.kept.token.id) == revoked
        assert await tokens.revoke("0" * 12) is None


async def test_a_good_token_has_its_name_alone(place: Place) -> None:
    async with place.scene() as scene:
        tokens = TokenStore(scene.store)
        first = made("ci", now=scene.clock(), expires_at=scene.clock() + 10.0)
        await tokens.add(first.kept)
        await tokens.add(first.kept)
        with pytest.raises(NameTakenError, match=first.kept.token.id):
            await tokens.add(made("ci", now=scene.clock()).kept)
        scene.clock.advance(10.0)
        await tokens.add(made("ci", now=scene.clock()).kept)
        assert [token.name for token in await tokens.list()] == ["ci", "ci"]


async def test_a_token_expires_by_the_clock_of_the_store(place: Place) -> None:
    async with place.scene() as scene:
        tokens = TokenStore(scene.store)
        new = made(now=tokens.now(), expires_at=tokens.now() + 10.0)
        assert new.kept.token.is_good(tokens.now())
        scene.clock.advance(10.0)
        assert not new.kept.token.is_good(tokens.now())


async def test_as_many_tokens_are_good_as_may_be_and_what_is_over_makes_room(place: Place) -> None:
    async with place.scene() as scene:
        tokens = TokenStore(scene.store)
        now = scene.clock()
        many = [made(f"n{n}", now=now + n / 1_000).kept for n in range(MAX_TOKENS)]
        await scene.store.run(partial(added, many=many))
        with pytest.raises(LimitReachedError, match="revoke some"):
            await tokens.add(made(now=now).kept)
        await tokens.revoke(many[7].token.id)
        await tokens.add(made("last", now=now + 9).kept)
        names = {token.name for token in await tokens.list()}
        assert len(names) == MAX_TOKENS
        assert "last" in names
        assert "n7" not in names


async def test_who_made_or_revoked_a_token_is_written_with_it(place: Place) -> None:
    async with place.scene() as scene:
        tokens, audit = TokenStore(scene.store), AuditLog(scene.store)
        new = made(now=scene.clock())
        token_id, actor = new.kept.token.id, Actor(name="op")
        await tokens.add(new.kept, AuditEntry(actor=actor, action="token.create", subject=token_id))
        for _ in range(2):
            entry = AuditEntry(actor=actor, action="token.revoke", subject=token_id)
            await tokens.revoke(token_id, entry)
        rows = (await audit.page()).rows
        assert [(row.action, row.subject) for row in rows] == [
            ("token.revoke", token_id),
            ("token.create", token_id),
        ]


def added(transaction: Transaction, now: float, *, many: list[KeptToken]) -> None:
    for kept in many:
        token_rows.add(transaction, now, kept=kept)


def test_what_is_asked_of_a_store_can_be_sent_to_another_process() -> None:
    kept = made().kept
    for operation in (
        partial(token_rows.create_first, kept=kept),
        partial(token_rows.add, kept=kept),
        partial(token_rows.get, token_id="a"),
        partial(token_rows.revoke, token_id="a"),
        token_rows.listed,
    ):
        assert pickle.loads(pickle.dumps(operation)) is not None
    assert pickle.loads(pickle.dumps(kept)) == kept


def test_a_hash_tells_nothing_of_a_secret_and_is_always_the_same() -> None:
    assert hash_of("a") == hash_of("a") != hash_of("b")
    assert len(hash_of("a")) == 64
