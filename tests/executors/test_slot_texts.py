"""The key of a slot: where it is written, when it is read, and where it never appears."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from executors.endpoint import reply, running_endpoint
from executors.orders import failure_of, order, result_of
from headgate.core.lifecycle import NOTHING_USED, Limited
from headgate.errors import InvalidSettingError
from headgate.executors.build import build_executor
from headgate.executors.executor import OrderView, WorkOrder
from headgate.executors.targets import CommandTarget, HttpTarget, Target
from headgate.executors.templates import MAX_KEYS, Environment, SlotText
from headgate.testing import VirtualClock

KEYS = {"work": "k-work-123", "home": "k-home-456"}
PATH = {"PATH": os.environ["PATH"], "SCHEME": "Bearer"}


def read_key(slot: str) -> str:
    if slot not in KEYS:
        raise InvalidSettingError(f"slots.{slot}.key_env", "the variable K is not set; set it")
    return KEYS[slot]


def build(target: Target) -> Any:
    return build_executor("it", target, environ=PATH, clock=VirtualClock(), slot_keys=read_key)


def on(slot: str | None) -> WorkOrder:
    return msgspec.structs.replace(order(), slot=slot)


async def executed(target: Target, slot: str | None) -> Any:
    executor = build(target)
    await executor.open()
    try:
        return await executor.execute(on(slot))
    finally:
        await executor.close()


async def test_headers_and_the_path_have_what_belongs_to_the_slot_of_the_attempt() -> None:
    headers = {"Authorization": "{env.SCHEME} {slot.key}", "X-Slot": "{slot.name}", "X-Own": "1"}
    async with running_endpoint() as endpoint:
        target = HttpTarget(url=f"{endpoint.url}/at/{{slot.name}}", headers=headers, provider="zai")
        for slot in ("work", "home"):
            result_of(await executed(target, slot))
        seen = [(one.path, one.headers["authorization"]) for one in endpoint.seen]
        assert seen == [("/at/work", "Bearer k-work-123"), ("/at/home", "Bearer k-home-456")]
        assert endpoint.seen[1].headers["x-slot"] == "home"
        assert endpoint.seen[1].headers["x-own"] == "1"


async def test_a_key_that_changes_is_read_anew_for_each_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_endpoint() as endpoint:
        target = HttpTarget(url=endpoint.url, headers={"X-Key": "{slot.key}"}, slot="work")
        executor = build(target)
        await executor.open()
        await executor.execute(on("work"))
        monkeypatch.setitem(KEYS, "work", "k-work-new")
        await executor.execute(on("work"))
        await executor.close()
        assert [one.headers["x-key"] for one in endpoint.seen] == ["k-work-123", "k-work-new"]


async def test_a_key_that_the_endpoint_repeats_is_not_shown() -> None:
    async with running_endpoint(reply(403, b"bad key k-work-123")) as endpoint:
        target = HttpTarget(url=endpoint.url, headers={"X-Key": "{slot.key}"}, slot="work")
        failure = failure_of(await executed(target, "work"))
    assert failure.error == "executor returned 403: bad key {slot.key}"


async def test_a_command_has_the_key_in_its_variables_and_not_in_its_errors() -> None:
    script = 'echo "$API_KEY $NAMED $HEADGATE_SLOT" >&2; exit 3'
    target = CommandTarget(
        command=("sh", "-c", script),
        env={"API_KEY": "{slot.key}", "NAMED": "at-{slot.name}"},
        provider="zai",
    )
    failure = failure_of(await executed(target, "work"))
    assert failure.error == "command exited with 3: {slot.key} at-work work"


TARGETS = [
    HttpTarget(url="http://127.0.0.1:1/", headers={"X-Key": "{slot.key}"}, slot="gone"),
    CommandTarget(command=("true",), env={"API_KEY": "{slot.key}"}, slot="gone"),
]


@pytest.mark.parametrize("target", TARGETS)
async def test_a_key_that_cannot_be_read_fails_the_attempt_and_costs_nothing(
    target: Target,
) -> None:
    failure = failure_of(await executed(target, "gone"))
    assert "slots.gone.key_env" in failure.error
    assert (failure.is_transient, failure.usage) == (True, NOTHING_USED)


@pytest.mark.parametrize("target", TARGETS)
async def test_a_task_without_a_slot_fails_where_its_target_needs_one(target: Target) -> None:
    failure = failure_of(await executed(target, None))
    assert "needs a slot, and the task has none" in failure.error


WRONG: list[tuple[Target, str, str]] = [
    (
        HttpTarget(url="http://h/", headers={"X-Key": "{slot.key}"}),
        "targets.it.headers.X-Key",
        "write slot or provider",
    ),
    (HttpTarget(url="http://h/{slot.name}"), "targets.it.url", "write slot or provider"),
    (
        CommandTarget(command=("true",), env={"K": "{slot.key}"}),
        "targets.it.env.K",
        "write slot or provider",
    ),
    (HttpTarget(url="http://h/{slot.key}", slot="work"), "targets.it.url", "into a header"),
    (HttpTarget(url="http://{slot.name}/", slot="work"), "targets.it.url", "host"),
    (
        HttpTarget(url="http://h/", headers={"X": "{slot.other}"}, slot="work"),
        "targets.it.headers.X",
        "{slot.other}",
    ),
    (
        HttpTarget(url="http://h/", headers={"X": "é {slot.key}"}, slot="work"),
        "targets.it.headers.X",
        "printable",
    ),
    (
        HttpTarget(url="http://h/", headers={"Host": "{slot.name}"}, slot="work"),
        "targets.it.headers.Host",
        "leave it out",
    ),
    (
        CommandTarget(command=("run", "{slot.key}"), slot="work"),
        "targets.it.command",
        "{slot.key} is not filled in a command",
    ),
]


@pytest.mark.parametrize(("target", "field", "problem"), WRONG)
def test_a_place_for_a_slot_that_cannot_be_filled_is_a_wrong_setting(
    target: Target, field: str, problem: str
) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        build(target)
    assert caught.value.field == field
    assert problem in caught.value.problem


def test_a_function_sees_the_name_of_its_slot() -> None:
    assert OrderView(on("work"))["slot"] == "work"
    assert OrderView(on(None))["slot"] is None


def test_a_name_in_any_letters_can_be_sent_in_a_header() -> None:
    environment = Environment({}, has_slot=True, slot_keys=read_key)
    text = SlotText("{slot.name}", setting="x", environment=environment)
    assert text.filled(on("büro"), written=str.upper) == "BÜRO"


def test_a_variable_that_looks_like_a_place_is_only_a_text() -> None:
    environment = Environment({"ODD": "{slot.key}"}, has_slot=True, slot_keys=read_key)
    text = SlotText("{env.ODD} {slot.name}", setting="x", environment=environment)
    assert text.filled(on("work")) == "{slot.key} work"


def test_only_so_many_keys_are_remembered_and_none_is_shown() -> None:
    environment = Environment({}, has_slot=True, slot_keys=lambda slot: f"key-of-{slot}")
    for number in range(MAX_KEYS + 5):
        environment.key_of(f"{number:05}")
    assert environment.cleaned(f"key-of-{MAX_KEYS:05}") == "{slot.key}"
    assert environment.cleaned("key-of-00001") == "key-of-00001"
    assert "key-of" not in repr(environment)


@pytest.mark.parametrize("status", [200, 429, 500])
async def test_what_comes_back_with_the_key_of_a_slot_is_shown_to_its_slot(status: int) -> None:
    seen: list[tuple[str, int, str, float]] = []

    def observe(
        slot: str, status: int, headers: Mapping[str, str], now: float, **_: object
    ) -> None:
        seen.append((slot, status, headers["x-ratelimit-remaining-tokens"], now))

    clock = VirtualClock()
    async with running_endpoint(reply(status, b"{}", X_RateLimit_Remaining_Tokens="7")) as endpoint:
        target = HttpTarget(url=endpoint.url, provider="openai")
        executor = build_executor(
            "it", target, environ=PATH, clock=clock, slot_keys=read_key, observe_slot=observe
        )
        await executor.open()
        for slot in ("work", None):
            await executor.execute(on(slot))
        await executor.close()
    assert seen == [("work", status, "7", clock())]


KEYED = {"authorization": "Bearer {slot.key}"}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "fields", "status", "body", "refused"),
    [
        (CHAT, {"headers": KEYED}, 401, b"{}", "k-work-123"),
        (CHAT, {"headers": KEYED}, 403, b'{"error":{"code":"key_revoked"}}', "k-work-123"),
        # About what was asked, and not about the key.
        (CHAT, {"headers": KEYED}, 403, b"{}", ""),
        (CHAT, {"headers": KEYED}, 401, b'{"error":{"code":"insufficient_permissions"}}', ""),
        (CHAT, {"headers": KEYED}, 500, b"{}", ""),
        # An endpoint of the user's own, or one that got no key.
        ("/agent", {"headers": KEYED}, 401, b"{}", ""),
        (CHAT, {}, 401, b"{}", ""),
    ],
)
async def test_a_slot_is_shown_that_a_model_api_refused_its_key(
    path: str, fields: dict[str, Any], status: int, body: bytes, refused: str
) -> None:
    seen: list[tuple[str, int, str]] = []

    def observe(
        slot: str, status: int, _: Mapping[str, str], __: float, *, refused_key: str = ""
    ) -> None:
        seen.append((slot, status, refused_key))

    async with running_endpoint(reply(status, body)) as endpoint:
        executor = build_executor(
            "it",
            HttpTarget(url=endpoint.url + path, provider="openai", **fields),
            environ=PATH,
            clock=VirtualClock(),
            slot_keys=read_key,
            observe_slot=observe,
        )
        await executor.open()
        failure_of(await executor.execute(on("work")))
        await executor.close()
    assert seen == [("work", status, refused)]


@pytest.mark.parametrize(
    ("fields", "names_slot", "slot"),
    [
        # The settings say whose answer it is, or the key does.
        ({"slot": "work"}, False, "work"),
        ({"provider": "openai"}, False, "work"),
        ({"provider": "openai", "headers": KEYED}, True, "work"),
        ({"slot": "other", "headers": KEYED}, True, "work"),
        # A task that names a slot beside any target says nothing of who answers.
        ({}, True, None),
        ({"slot": "other"}, True, None),
        ({"provider": "openai"}, True, None),
        ({"provider": "openai", "headers": {"x-slot": "{slot.name}"}}, True, None),
    ],
)
async def test_a_pause_is_of_a_slot_only_where_its_provider_answered(
    fields: dict[str, Any], names_slot: bool, slot: str | None
) -> None:
    seen: list[str] = []
    async with running_endpoint(reply(429, b"{}", Retry_After="60")) as endpoint:
        executor = build_executor(
            "it",
            HttpTarget(url=endpoint.url, **fields),
            environ=PATH,
            clock=VirtualClock(),
            slot_keys=read_key,
            observe_slot=lambda name, *_, **__: seen.append(name),
        )
        await executor.open()
        order = msgspec.structs.replace(on("work"), names_slot=names_slot)
        outcome = await executor.execute(order)
        await executor.close()
    assert isinstance(outcome, Limited)
    assert outcome.slot == slot
    assert seen == ([] if slot is None else [slot])
