"""Slots of the file and the tasks that use them, in a whole service: holds, keys, reloads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from config.running import FAST, WORK, Running, running
from executors.endpoint import Endpoint, reply_json, running_endpoint
from headgate.client.worker import order_of
from headgate.core.task_view import TaskSnapshot

CHAT = """
[targets.chat]
kind = "http"
url = "{url}/{{slot.name}}"
{way}
headers = {{ Authorization = "Bearer {{slot.key}}" }}
default = true
"""


def slot(folder: Path, name: str, *, key: str, rest: str = "") -> str:
    """Write a slot whose key is in a file, and whose provider does not answer."""
    file = folder / f"{name}.{key}"
    file.write_text(key)
    place = 'provider = "zai"\nbase_url = "http://127.0.0.1:1"'
    return f'[[slots]]\nname = "{name}"\nkey_file = "{file}"\n{place}\n{rest}\n'


def chat(endpoint: Endpoint, way: str) -> str:
    return CHAT.format(url=endpoint.url, way=way)


async def reload(service: Running, text: str, status: int = 200) -> str:
    service.path.write_text(text)
    response = await service.ask("POST", "/scheduler/reload")
    assert response.status == status, response.body
    return "" if status == 200 else str(response.problem["error"])


def keys_seen(endpoint: Endpoint) -> list[str]:
    return [one.headers["authorization"] for one in endpoint.seen]


async def test_a_disabled_slot_holds_its_tasks_until_it_is_enabled(tmp_path: Path) -> None:
    off = slot(tmp_path, "work", key="k-1", rest="enabled = false")
    async with running(tmp_path, FAST + WORK + off) as service:
        task_id = await service.submit(slot="work")
        assert await service.why(task_id) == ["slot work is closed: disabled in the configuration"]
        other = await service.ended(await service.submit())
        assert (other["state"], other.get("slot")) == ("done", None)
        await reload(service, FAST + WORK + slot(tmp_path, "work", key="k-1"))
        task = await service.ended(task_id)
        assert (task["state"], task["slot"]) == ("done", "work")
        why = await service.get(f"/tasks/{task_id}/why")
        assert (why["reasons"], why["slot"]["name"]) == ([], "work")


async def test_an_attempt_has_the_key_of_its_slot_as_it_is_configured_now(tmp_path: Path) -> None:
    async with running_endpoint(reply_json({})) as endpoint:
        text = FAST + chat(endpoint, 'provider = "zai"')
        async with running(tmp_path, text + slot(tmp_path, "work", key="k-first")) as service:
            task = await service.ended(await service.submit())
            assert (task["slot"], task["provider"]) == ("work", "zai")
            await reload(service, text + slot(tmp_path, "work", key="k-second"))
            await service.ended(await service.submit())
        assert keys_seen(endpoint) == ["Bearer k-first", "Bearer k-second"]
        assert [one.path for one in endpoint.seen] == ["/work", "/work"]


async def test_a_slot_that_left_the_file_is_not_taken_any_more(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + WORK + slot(tmp_path, "work", key="k-1")) as service:
        await service.ended(await service.submit(slot="work"))
        await reload(service, FAST + WORK)
        body = {"agentId": "a", "action": "run", "slot": "work"}
        response = await service.ask("POST", "/tasks", body)
        assert (response.status, response.problem["code"]) == (400, "unknown_slot")
        assert response.problem["details"] == {"field": "slot"}


@pytest.mark.parametrize(
    ("way", "line"),
    [
        ("", "targets.chat.url: has a placeholder for a slot, and the target names none"),
        (
            'slot = "work"\nprovider = "zai"',
            "targets.chat.provider: give either slot or provider, not both",
        ),
        ('provider = "openai"', "targets.chat.provider: no [[slots]] has the provider 'openai'"),
    ],
)
async def test_a_target_that_cannot_have_its_slot_changes_nothing(
    tmp_path: Path, way: str, line: str
) -> None:
    async with running_endpoint(reply_json({})) as endpoint:
        slots = slot(tmp_path, "work", key="k-1")
        before = FAST + chat(endpoint, 'slot = "work"') + slots
        async with running(tmp_path, before) as service:
            assert line in await reload(service, FAST + chat(endpoint, way) + slots, status=422)
            assert (await service.ended(await service.submit()))["state"] == "done"


def test_a_worker_is_told_the_name_of_the_slot() -> None:
    fields = {"priority": 0, "weight": 1.0, "maxAttempts": 1, "attempt": 1, "projectId": "x"}
    fields |= {"onParentFailure": "fail", "onExhausted": "wait", "state": "running"}
    fields |= {"taskId": "t", "createdAt": "2026-01-01T00:00:00Z", "slot": "work"}
    snapshot = msgspec.convert(fields, TaskSnapshot)
    assert order_of(snapshot, "a").slot == "work"
