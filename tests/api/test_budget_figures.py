"""The journal and the burn rate over HTTP: paged, bounded, and of one's own alone."""

from __future__ import annotations

from typing import Any

import pytest

from api.asgi_client import Response, answer_of
from api.test_budgets_api import IN_SEARCH, KINDS, Bank, bank
from headgate.storage.tokens import Bounds


async def journal(it: Bank, query: str = "", token: str = "") -> Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return await answer_of(it.client.app, "GET", f"/budgets/journal{query}", headers=headers)


async def pages(it: Bank, limit: int) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = []
    cursor = ""
    while True:
        answer = (await journal(it, f"?scope=session:s&limit={limit}{cursor}")).json
        found.append(answer["entries"])
        if "nextCursor" not in answer:
            return found
        cursor = f"&cursor={answer['nextCursor']}"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_change_is_told_with_its_amounts_and_scopes(kind: str) -> None:
    async with bank(kind) as it:
        await it.ask("reserve", id="r1", scope=IN_SEARCH, usd="0.25", tokens=10)
        await it.ask("commit", id="r1", scope=IN_SEARCH, usd="0.30", tokens=7)
        answer = (await journal(it, f"?scope={IN_SEARCH}")).json
        assert (answer["scope"], answer["count"]) == (IN_SEARCH, 2)
        commit = answer["entries"][0]
        assert commit["call"] == "commit"
        assert commit["scopes"] == ["", "project:search", IN_SEARCH]
        amounts = [commit[name] for name in ("spentUsd", "reservedUsd", "overrunUsd")]
        assert amounts == ["0.25", "-0.25", "0.05"]
        assert (commit["spentTokens"], commit["reservedTokens"]) == (7, -10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
async def test_pages_have_every_change_once_also_those_of_one_moment(kind: str, limit: int) -> None:
    async with bank(kind) as it:
        for number in range(9):
            await it.ask("reserve", id=f"r{number}", scope="session:s", usd="0.01")
            if number % 4 == 3:
                it.clock.advance(1.5)
        found = await pages(it, limit)
        names = [entry["reservationId"].rpartition(":")[2] for page in found for entry in page]
        assert names == [f"r{number}" for number in reversed(range(9))]
        assert all(len(page) <= limit for page in found)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_comes_between_two_pages_moves_nothing(kind: str) -> None:
    async with bank(kind) as it:
        for number in range(4):
            await it.ask("reserve", id=f"r{number}", scope="session:s", usd="0.01")
        first = (await journal(it, "?scope=session:s&limit=2")).json
        it.clock.advance(1.0)
        await it.ask("reserve", id="late", scope="session:s", usd="0.01")
        query = f"?scope=session:s&limit=2&cursor={first['nextCursor']}"
        second = (await journal(it, query)).json
        names = [entry["reservationId"].rpartition(":")[2] for entry in second["entries"]]
        assert names == ["r1", "r0"]


@pytest.mark.parametrize(
    "query",
    [
        "?cursor=x",
        "?cursor=1.5_99999",
        "?cursor=-1_2",
        "?limit=0",
        "?limit=1001",
        "?scope=%22",
        "?scop=session:s",
    ],
)
async def test_a_question_that_cannot_be_meant_is_refused(query: str) -> None:
    async with bank("store") as it:
        assert (await journal(it, query)).status == 400


async def test_a_bound_token_reads_its_own_journal_and_is_told_of_no_other_scope() -> None:
    async with bank("store") as it:
        await it.ask("reserve", id="r1", scope=IN_SEARCH, usd="0.25", also=["team:secret"])
        await it.ask("reserve", id="r2", scope="project:other", usd="0.25")
        token = it.token("read", bounds=Bounds(project_id="search"))
        own = (await journal(it, token=token)).json
        assert own["scope"] == "project:search"
        assert [entry["scopes"] for entry in own["entries"]] == [["project:search", IN_SEARCH]]
        for scope in ("project:other", "team:secret"):
            assert (await journal(it, f"?scope={scope}", token)).status == 403


async def test_reading_the_journal_needs_the_permission_to_read() -> None:
    async with bank("store") as it:
        assert (await journal(it, token=it.token("submit"))).status == 403


@pytest.mark.parametrize("kind", KINDS)
async def test_the_status_tells_how_fast_money_goes_and_until_when_it_lasts(kind: str) -> None:
    async with bank(kind) as it:
        await it.tracker.set_budget("session:s", limit_usd="1.00")
        await it.ask("reserve", id="r1", scope="session:s", usd="0.25")
        for name in ("r2", "r3", "r4"):
            it.clock.advance(600)
            await it.ask("reserve", id=name, scope="session:s", usd="0.10", dispatched=True)
            await it.ask("commit", id=name, scope="session:s", usd="0.10")
        status = (await it.status("session:s")).json
        assert status["burnUsdPerHour"] == "0.60"
        assert status["burnMeasuredSeconds"] == 1_800
        assert "exhaustedAt" in status
        it.clock.advance(601)
        assert "exhaustedAt" not in (await it.status("session:s")).json
        await it.tracker.set_budget("session:s", limit_usd="0.25")
        assert "exhaustedAt" in (await it.status("session:s")).json
