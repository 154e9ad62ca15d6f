"""Where the tasks of the demonstration are done: as each of them says, and only on this machine."""

from __future__ import annotations

import msgspec
import pytest

from headgate.cli.up_demo import KEYS, KINDS, Demo, DemoWorld
from headgate.config import Settings
from headgate.config.loading import Origin, load
from headgate.executors.http import ATTEMPT
from headgate.executors.targets import HttpTarget
from headgate.testing import FakeProvider
from headgate.testing.fake_provider import FakeResponse

WORK = "/work"


async def done(
    world: DemoWorld, *, attempt: int = 1, key: str = "", **params: object
) -> FakeResponse:
    headers = {ATTEMPT: str(attempt)} | ({"authorization": f"Bearer {key}"} if key else {})
    body = msgspec.json.encode({"kind": "summarise", "seconds": 0, **params})
    return await world.respond(WORK, headers, body)


async def test_a_call_of_a_model_takes_as_long_and_uses_as_much_as_it_says() -> None:
    said = {"seconds": "0", "tokens": "1000", "of": "a page"}
    body = msgspec.json.encode({"model": "demo-chat", "messages": [], "metadata": said})
    answer = await DemoWorld(FakeProvider()).respond("/v1/chat/completions", {}, body)
    usage = msgspec.json.decode(answer.body)["usage"]
    assert usage == {"prompt_tokens": 800, "completion_tokens": 200}
    wrong = await DemoWorld(FakeProvider()).respond("/v1/chat/completions", {}, b"[]")
    assert wrong.status == 400


async def test_a_task_tells_what_it_used() -> None:
    answer = await done(DemoWorld(FakeProvider()), tokens=1_000, of="a page")
    body = msgspec.json.decode(answer.body)
    assert answer.status == 200
    assert body["usage"] == {"prompt_tokens": 800, "completion_tokens": 200}
    assert body["text"] == "summarise is done: a page."


@pytest.mark.parametrize(
    ("course", "attempt", "status"),
    [("fails", 1, 422), ("fails", 2, 422), ("recovers", 1, 500), ("recovers", 2, 200)],
)
async def test_a_task_fails_as_it_says(course: str, attempt: int, status: int) -> None:
    answer = await done(DemoWorld(FakeProvider()), attempt=attempt, course=course)
    assert answer.status == status


async def test_a_key_is_used_and_turned_away_when_its_window_is_used_up() -> None:
    provider = FakeProvider(percent_per_request=50.0)
    world = DemoWorld(provider)
    statuses = [(await done(world, key="k")).status for _ in range(2)]
    refused = await done(world, key="k")
    assert statuses == [200, 200]
    assert provider.window("k").percent == 100.0
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) > 0
    assert (await done(world, key="another")).status == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (WORK, b"no JSON", 400),
        (WORK, b'{"seconds": 1000}', 400),
        ("/hooks/taken", b"{}", 204),
        ("/hooks/gone", b"{}", 410),
        ("/elsewhere", b"", 404),
    ],
)
async def test_anything_else_has_an_answer_too(path: str, body: bytes, status: int) -> None:
    assert (await DemoWorld(FakeProvider()).respond(path, {}, body)).status == status


def settings_of(demo: Demo) -> Settings:
    return load(Origin(path=demo.settings_file, environ=demo.environ)).settings


def test_the_settings_know_everything_that_the_plan_names() -> None:
    with Demo() as demo:
        settings = settings_of(demo)
    for kind in KINDS:
        assert kind.project in settings.projects
        assert set(kind.agents) <= settings.agents.keys()
        assert kind.target is None or kind.target in settings.targets
        assert kind.scope is None or kind.scope in settings.budgets
    assert len(settings.agents) == 12
    keys = [slot.key_env for slot in settings.slots.values()]
    keys += [upstream.key_env for upstream in settings.upstreams.values()]
    assert set(keys) == KEYS.keys()


def test_every_address_of_the_settings_is_on_this_machine_and_nothing_is_kept() -> None:
    with Demo() as demo:
        settings = settings_of(demo)
        assert demo.folder.exists()
    urls = [one.url for one in settings.targets.values() if isinstance(one, HttpTarget)]
    urls += [slot.base_url or "" for slot in settings.slots.values()]
    urls.append(settings.webhooks.alerts_url or "")
    assert all(url.startswith("http://127.0.0.1:") for url in urls)
    assert settings.store.url == "memory:"
    assert not demo.folder.exists()
