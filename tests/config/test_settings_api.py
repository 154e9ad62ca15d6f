"""`GET /settings`: what is in force, from where, and what became of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.running import FAST, WORK, Running, running

FILE = FAST + WORK + "[projects.a]\ncredit_weight = 2.0\n"
SECRET = """
[targets.web]
kind = "http"
url = "http://127.0.0.1:9/run?key=canary"
headers = { authorization = "Bearer canary" }
"""


async def reload(service: Running, text: str) -> int:
    service.path.write_text(text)
    return (await service.ask("POST", "/scheduler/reload")).status


async def test_every_value_has_its_origin(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        body = await service.get("/settings?changed=true&limit=1000")
        values = {one["key"]: (one["value"], one["origin"]) for one in body["settings"]}
        assert values["projects.a.credit_weight"] == (2.0, str(service.path))
        assert values["store.url"] == ("memory:", "option")
        assert "scheduler.max_inflight" not in values
        assert body["matching"] == len(values)
        assert body["file"] == str(service.path)
        assert (body["overrides"], body["needsRestart"]) == ([], [])
        assert "lastReload" not in body
        everything = await service.get("/settings?section=scheduler")
        found = {one["key"]: one["origin"] for one in everything["settings"]}
        assert found["scheduler.max_inflight"] == "default"


async def test_settings_come_page_by_page(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        first = await service.get("/settings?limit=40")
        keys = [one["key"] for one in first["settings"]]
        cursor = first["nextCursor"]
        while cursor:
            page = await service.get(f"/settings?limit=40&cursor={cursor}")
            keys += [one["key"] for one in page["settings"]]
            cursor = page.get("nextCursor")
    assert len(keys) == len(set(keys)) == first["matching"]


async def test_a_text_is_looked_for_in_keys_and_shown_values_and_never_in_secrets(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FILE + SECRET) as service:
        assert (await service.get("/settings?text=TARGETS.web.headers"))["matching"] == 1
        assert (await service.get("/settings?text=127.0.0.1:9"))["matching"] == 1
        assert (await service.get("/settings?text=canary"))["matching"] == 0
        assert b"canary" not in (await service.ask("GET", "/settings?limit=1000")).body


async def test_what_was_changed_beside_the_file_is_named_with_what_resets_it(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FILE) as service:
        await service.ask("PATCH", "/projects/a", {"creditWeight": 9})
        await service.ask("POST", "/scheduler/pause")
        body = await service.get("/settings?text=credit_weight&changed=true")
        (override,) = body["overrides"]
        assert override.pop("at")
        assert override == {
            "key": "projects.a.credit_weight",
            "kind": "projects",
            "name": "a",
            "field": "creditWeight",
            "value": 9.0,
            "fileValue": 2.0,
            "by": "local",
        }
        (value,) = body["settings"]
        assert (value["value"], value["origin"]) == (9.0, "override")


async def test_the_last_reload_is_told_with_what_waits_for_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        cold = '[log]\nlevel = "debug"\n'
        assert await reload(service, FILE.replace("2.0", "3.0") + cold) == 200
        body = await service.get("/settings?changed=true&section=log")
        assert body["lastReload"]["by"] == "local"
        assert body["lastReload"]["changed"] == [
            {"key": "projects.a.credit_weight", "from": 2.0, "to": 3.0}
        ]
        waiting = [{"key": "log.level", "from": "info", "to": "debug"}]
        assert body["needsRestart"] == waiting
        assert body["settings"] == []
        assert await reload(service, FILE.replace("2.0", "3.0") + cold) == 200
        again = await service.get("/settings")
        assert (again["lastReload"]["changed"], again["needsRestart"]) == ([], waiting)


async def test_a_file_that_was_not_taken_is_told_until_one_is(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        assert await reload(service, "[projects.a]\ncredit_weight = -1\n") == 422
        last = (await service.get("/settings"))["lastReload"]
        assert last["problem"].startswith("projects.a.credit_weight:")
        assert last["changed"] == []
        assert await reload(service, FILE) == 200
        assert "problem" not in (await service.get("/settings"))["lastReload"]


@pytest.mark.parametrize(
    "query", ["section=none", "changed=perhaps", "cursor=x", "limit=0", "sectoin=log"]
)
async def test_a_question_that_makes_no_sense_is_refused(tmp_path: Path, query: str) -> None:
    async with running(tmp_path, FILE) as service:
        assert (await service.ask("GET", f"/settings?{query}")).status == 400
