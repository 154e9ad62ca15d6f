"""Budgets over HTTP, for operators: taking limits away, reservations by their ids, and typos."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.running import FAST, WORK, Running, running

BUDGETS = """
[projects.a]
budget_limit = 500

[budgets."session:filed"]
limit_usd = "5.00"
"""
FILE = FAST + WORK + BUDGETS


async def limits(service: Running) -> dict[str, object]:
    """Return what the ledger limits, by scope."""
    status = await service.get("/budgets/status")
    return {
        one["scope"]: one.get("limitUsd") or one.get("limitTokens")
        for one in status["children"]
        if "limitUsd" in one or "limitTokens" in one
    }


async def actions(service: Running) -> list[tuple[str, str]]:
    page = await service.get("/audit")
    return [(one["action"], one["subject"]) for one in page["entries"]]


async def test_a_budget_of_the_file_is_deleted_until_the_file_changes_it(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        answer = await service.ask("DELETE", "/budgets?scope=session:filed")
        assert [one["scope"] for one in answer.json["budgets"]] == ["project:a"]
        assert "session:filed" not in await limits(service)
        service.path.write_text(FILE.replace("5.00", "6.00"))
        await service.ask("POST", "/scheduler/reload")
        assert (await limits(service))["session:filed"] == "6.00"


async def test_a_budget_that_was_set_here_is_deleted(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        await service.ask("PATCH", "/budgets?scope=session:s", {"limitUsd": "3", "window": "day"})
        assert (await limits(service))["session:s"] == "3.00"
        assert (await service.ask("DELETE", "/budgets?scope=session:s")).status == 200
        assert "session:s" not in await limits(service)
        assert (await actions(service))[0] == ("budget.patch", "session:s")


async def test_a_budget_that_a_client_created_is_deleted(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        await service.ask("POST", "/budgets/create", {"scope": "session:c", "limitUsd": "3"})
        assert (await service.ask("DELETE", "/budgets?scope=session:c")).status == 200
        assert "session:c" not in await limits(service)
        assert (await actions(service))[0] == ("budget.delete", "session:c")


@pytest.mark.parametrize(
    ("scope", "status", "line"),
    [
        ("session:none", 404, "there is no budget 'session:none'"),
        ("project:a", 400, "budgetLimit of project 'a'"),
        ("nonsense", 400, "nonsense"),
    ],
)
async def test_what_cannot_be_deleted_is_refused(
    tmp_path: Path, scope: str, status: int, line: str
) -> None:
    async with running(tmp_path, FILE) as service:
        answer = await service.ask("DELETE", f"/budgets?scope={scope}")
        assert answer.status == status
        assert line in answer.problem["error"]
        assert (await service.ask("DELETE", "/budgets")).status == 400


async def reserved_id(service: Running) -> str:
    """Hold a dollar, and return the id that the journal shows."""
    body = {"id": "call-1", "scope": "session:filed", "usd": "1.00"}
    assert (await service.ask("POST", "/budgets/reserve", body)).status == 200
    (entry,) = (await service.get("/budgets/journal"))["entries"]
    return str(entry["reservationId"])


async def test_an_operator_releases_what_the_journal_shows(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        name = await reserved_id(service)
        answer = await service.ask(
            "POST", f"/reservations/{name}/release", {"reason": "not billed"}
        )
        assert (answer.status, answer.json) == (200, {"id": name, "state": "released"})
        assert (await service.get("/budgets/status"))["reservedUsd"] == "0.00"
        page = await service.get("/audit")
        assert page["entries"][0]["action"] == "budget.release"
        assert page["entries"][0]["detail"] == {"reason": "not billed"}
        # A release says the same when it is repeated, and the other way round it is a conflict.
        again = await service.ask("POST", f"/reservations/{name}/release", {})
        assert again.status == 200
        late = await service.ask("POST", f"/reservations/{name}/extend", {"leaseSeconds": 5})
        assert (late.status, late.problem["code"]) == (409, "reservation_conflict")


async def test_an_operator_extends_what_the_journal_shows(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        name = await reserved_id(service)
        answer = await service.ask("POST", f"/reservations/{name}/extend", {"leaseSeconds": 3600})
        assert answer.status == 200
        assert (answer.json["id"], answer.json["isLive"]) == (name, True)
        assert (await actions(service))[0] == ("budget.extend", name)
        wrong = await service.ask("POST", f"/reservations/{name}/extend", {"leaseSeconds": -1})
        assert wrong.status == 400


async def test_a_reservation_that_nobody_made_is_not_found(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        for verb, body in (("release", {}), ("extend", {"leaseSeconds": 5})):
            answer = await service.ask("POST", f"/reservations/never/{verb}", body)
            assert (answer.status, answer.problem["code"]) == (404, "not_found")


TYPO = "Budget 'session:fild' is not defined, so nothing limits it; did you mean session:filed?"


async def warning(service: Running, scope: str) -> str | None:
    body = {"agentId": "a", "action": "run", "scopes": [scope]}
    answer = await service.ask("POST", "/tasks", body)
    assert answer.status == 202, answer.body
    found: str | None = answer.json.get("warning")
    return found


async def test_a_task_that_names_no_defined_budget_is_taken_with_a_warning(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        assert await warning(service, "session:fild") == TYPO
        far = "Budget 'team:x' is not defined, so nothing limits it."
        assert await warning(service, "team:x") == far
        batch = {
            "agentId": "a",
            "tasks": [
                {"action": "run", "scopes": ["session:fild"]},
                {"action": "run", "scopes": ["session:filed"]},
                {"action": "run"},
            ],
        }
        answer = await service.ask("POST", "/tasks/batch", batch)
        assert [one.get("warning") for one in answer.json["tasks"]] == [TYPO, None, None]


async def test_a_budget_or_one_around_it_or_a_project_is_defined(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        await service.ask("POST", "/budgets/create", {"scope": "session:made", "limitUsd": "3"})
        for scope in (
            *("session:filed", "session:filed/workflow:w", "session:made"),
            *("session:made/workflow:w/step:s", "project:default/team:t"),
        ):
            assert await warning(service, scope) is None
