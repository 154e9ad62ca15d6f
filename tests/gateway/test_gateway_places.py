"""The place of a call that was sent away, its money when it comes back, and other leaders."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from executors.endpoint import Endpoint, reply, running_endpoint
from gateway.billing_upstream import Plan, Request
from gateway.gateway_service import (
    CHAT,
    MESSAGES,
    RESPONSES,
    GatewayService,
    gateway_service,
    usd,
)
from gateway.test_gateway_faults import KEYS, SLOTS
from gateway.test_task_calls import claim, submit
from headgate.core.call import CallRecord, CallState
from headgate.core.gates import GatePart
from headgate.engine.call_registry import KeptPlaces
from headgate.gateway.relay import (
    MAX_NODES,
    HandoverReader,
    LeaderRelay,
    LostPlaces,
    Place,
    as_comment,
)

BUDGET = """
[gateway]
hold_seconds = 0.2
escrow = {escrow}

[projects.a]

[budgets."project:a"]
limit_usd = "5"
"""


async def test_a_call_that_comes_back_to_its_place_is_booked(tmp_path: Path) -> None:
    """It held money, was sent away when its upstream asked for a pause, and came again."""
    for number, escrow in enumerate(("true", "false")):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with gateway_service(folder, BUDGET.format(escrow=escrow)) as gateway:
            path = f"/p/a{RESPONSES}"
            first = await gateway.ask(path, "[[mark one]] [[fail 429]] hello")
            assert first.status_code == 429
            gateway.calls.open(GatePart("slot", "openai/gpt-5"))
            again = await gateway.ask(path, "[[mark one]] [[fail 429]] hello")
            assert again.status_code == 200, again.text
            assert again.headers["x-headgate-call-id"]
            record = await gateway.record(again)
            status = await gateway.status("project:a")
            booked = usd(float(status["spentUsd"])) + usd(float(status["overrunUsd"]))
            assert booked == record.micro_usd
            assert booked > 0
            assert usd(float(status["reservedUsd"])) == 0


def place(number: int, *, token_id: str = "t") -> CallRecord:
    return CallRecord(
        id=f"call-{number:04}", project_id="p", agent_id="a", model="m", token_id=token_id
    )


def test_one_tenant_takes_no_place_from_another() -> None:
    places = KeptPlaces(most=10, most_each=3)
    places.add("other", place(0, token_id="other"), 100.0)
    lost = [
        one.id for number in range(1, 6) for one in places.add(f"i{number}", place(number), 100.0)
    ]
    assert lost == ["call-0001", "call-0002"], "its own oldest ones"
    assert places.get("other", 50.0) is not None
    assert len(list(places)) == 4
    assert [one.id for one in places.expire(100.0)] == [f"call-{n:04}" for n in (0, 3, 4, 5)]
    assert not list(places)


def test_all_places_together_are_bounded() -> None:
    places = KeptPlaces(most=10, most_each=3)
    lost = [
        one.id
        for number in range(12)
        for one in places.add(f"i{number}", place(number, token_id=f"t{number}"), 100.0)
    ]
    assert lost == ["call-0000", "call-0001"]


def test_the_same_call_beside_itself_keeps_one_place() -> None:
    places = KeptPlaces()
    assert places.add("same", place(1), 100.0) == []
    assert [one.id for one in places.add("same", place(2), 100.0)] == ["call-0001"]
    assert places.of_call("call-0001") is None
    taken = places.take("same", 50.0)
    assert taken is not None
    assert taken.id == "call-0002"
    assert places.take("same", 50.0) is None


async def test_a_call_whose_client_is_away_is_a_row_until_its_place_is_given_up(
    tmp_path: Path,
) -> None:
    hold = "[gateway]\nhold_seconds = 0.2\n"
    async with gateway_service(tmp_path, hold, inflight=1) as gateway:
        first = gateway.start(CHAT, "[[until later]]")
        await gateway.until(lambda: len(gateway.upstream.requests) == 1)
        sent_away = await gateway.ask(CHAT)
        assert sent_away.status_code == 429
        call_id = sent_away.headers["x-headgate-call-id"]
        listed = (await gateway.client.get("/calls", params={"state": "waiting"})).json()["calls"]
        assert [one["callId"] for one in listed] == [call_id]
        why = (await gateway.client.get(f"/calls/{call_id}/why")).json()
        assert "its position is kept until" in why["reasons"][0]["message"]
        places = gateway.calls._away
        gateway.calls._give_up(places.expire(gateway.service.engine.now() + 3_600))
        await gateway.calls.settled(seconds=20)
        shown = (await gateway.client.get(f"/calls/{call_id}")).json()
        assert shown["state"] == CallState.CANCELLED.value
        assert "has not come back" in shown["error"]
        gateway.upstream.releases.add("later")
        assert (await first).status_code == 200
        await gateway.until_idle()
        used = (await gateway.client.get("/usage")).json()
        assert used["total"]["calls"] == 1


async def test_a_state_that_is_made_anew_at_any_moment_changes_nothing_for_calls(
    tmp_path: Path,
) -> None:
    """It is thrown away with every step of every call, while some wait, run, move and end."""
    text = BUDGET.format(escrow="true").replace("hold_seconds = 0.2", "hold_seconds = 60")
    async with gateway_service(tmp_path, text, inflight=1) as gateway:
        dispatcher = gateway.service.engine.dispatcher
        ended: list[CallRecord] = []

        def throw_away(_request: Request) -> None:
            dispatcher._start_anew()

        def note(record: CallRecord) -> None:
            ended.append(record)
            dispatcher._start_anew()

        gateway.upstream.decide = throw_away
        gateway.calls.listen(note)
        calls = []
        for number in range(12):
            # Every fourth is asked to wait for a moment, and goes on then.
            fails = "[[fail 429]]" if number % 4 == 1 else ""
            calls.append(gateway.start(f"/p/a{CHAT}", f"[[mark {number:02}]] {fails}"))
            await gateway.until(partial(_have_come, gateway, ended, number + 1))
            dispatcher._start_anew()
        answers = [await one for one in calls]
        assert [one.status_code for one in answers] == [200] * 12
        assert max(one.most_running for one in gateway.upstream.accounts.values()) == 1
        await gateway.until_idle()
        state = gateway.calls._state()
        assert state is None or not state.in_flight.calls
        status = await gateway.status("project:a")
        assert float(status["reservedUsd"]) == 0
        billed = sum(one.tokens for one in gateway.upstream.bill)
        assert status["spentTokens"] + status["overrunTokens"] == billed
        marks = [one.mark for one in gateway.upstream.bill if one.end == "whole"]
        assert marks == sorted(marks), "each in its turn"


def _have_come(gateway: GatewayService, ended: list[CallRecord], count: int) -> bool:
    return len(gateway.calls) + len(ended) >= count


async def test_a_failure_while_the_state_is_made_anew_goes_to_the_next_key(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
        state, loop = gateway.calls._state, asyncio.get_running_loop()

        def be_back() -> None:
            gateway.calls._state = state
            gateway.service.engine.dispatcher._start_anew()

        def fail(_request: Request) -> Plan | None:
            if len(gateway.upstream.requests) > 1:
                return None
            gateway.calls._state = lambda: None
            loop.call_later(0.3, be_back)
            return Plan(status=500)

        gateway.upstream.decide = fail
        answer = await gateway.ask(MESSAGES)
        assert answer.status_code == 200, answer.text
        assert len(gateway.upstream.requests) == 2


async def test_a_task_makes_calls_while_the_state_is_made_anew(tmp_path: Path) -> None:
    text = '[targets.agent]\nkind = "pull"\ngateway = true\n'
    async with gateway_service(tmp_path, text) as gateway:
        engine = gateway.service.engine
        engine.node.address = f"http://127.0.0.1:{gateway.port}"
        task_id = await submit(gateway, "agent", estimate={"tokens": 1_000})
        _, access = await claim(gateway, task_id)
        for _ in range(3):
            engine.dispatcher._start_anew()
            assert await gateway.calls.tasks.attempt_of(access["token"]) is not None
        engine.dispatcher._start_anew()
        headers = {"authorization": f"Bearer {access['token']}"}
        answer = await gateway.ask(CHAT, headers=headers)
        assert answer.status_code == 200, answer.text


def test_places_that_were_lost_are_few_and_kept_for_a_while() -> None:
    places = LostPlaces(most=2, seconds=60.0)
    for number, key in enumerate((b"one", b"two", b"three")):
        places.keep(key, Place(f"call-{number}", 1.0), now=float(number))
    assert places.take(b"one", 10.0) is None, "the oldest one went"
    assert places.take(b"two", 10.0) == Place("call-1", 1.0)
    assert places.take(b"two", 10.0) is None
    assert places.take(b"three", 62.0) is None
    assert not places


SIGNED = Place("call-1", 1.0, 2).signed(b"secret", b"request")
EVENTS = b"event: ping\ndata: {}\n\n"
QUOTED = b'data: {"text": ": x-headgate-place call-1;1.0;2;00"}\n\n'


def read_in(pieces: Iterable[bytes]) -> tuple[bytes, bytes]:
    """Return what a client gets of a stream in pieces, and the place that it ends with."""
    reader = HandoverReader()
    shown = b"".join([reader.feed(piece) for piece in pieces])
    return shown + reader.finish(), reader.signed_place


@pytest.mark.parametrize(
    ("shown", "place"),
    [
        (EVENTS, SIGNED),
        (b"", SIGNED),
        (EVENTS + b": waits\n\n", SIGNED),
        (EVENTS, b""),
        (EVENTS + b": x-headgate", b""),
        (EVENTS + as_comment(SIGNED) + EVENTS, b""),
        (EVENTS + QUOTED, b""),
        (EVENTS + QUOTED, SIGNED),
    ],
)
def test_the_place_at_the_end_of_a_stream_is_found_wherever_the_stream_is_cut(
    shown: bytes, place: bytes
) -> None:
    stream = shown + (as_comment(place) if place else b"")
    for cut in range(len(stream) + 1):
        assert read_in([stream[:cut], stream[cut:]]) == (shown, place), cut
    for size in (1, 2, 3, 7):
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert read_in(pieces) == (shown, place), size


def test_only_what_may_be_a_place_is_kept_back() -> None:
    reader = HandoverReader()
    assert reader.feed(EVENTS) == EVENTS
    assert reader.feed(b": ") == b""
    assert reader.feed(b"waits") == b": waits"
    comment = as_comment(b"call-" + b"1" * 2_000)
    assert reader.feed(b"\n\n" + comment) == b"\n\n" + comment, "no place is that long"


async def test_a_relay_lets_go_of_the_node_that_it_has_not_asked_for_longest() -> None:
    relay = LeaderRelay(lambda: "")

    async def ask(node: Endpoint) -> None:
        sending = relay.send(node.url, "POST", "/", (), b"", mark=b"", place=b"")
        with await sending as response:
            assert await response.read_all(100) == b"{}"

    async with asyncio.timeout(10), AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(running_endpoint()) for _ in range(MAX_NODES + 1)]
        busy, used, oldest, *others = nodes
        busy.answer = reply(200, b"{}")[:-1]
        with await relay.send(busy.url, "POST", "/", (), b"", mark=b"", place=b""):
            for node in (used, oldest, used, *others):
                await ask(node)
            assert relay._pools.keys() == {node.url for node in nodes} - {oldest.url}
            await oldest.left.wait()
            await ask(used)
            assert used.connections == 1
        await relay.close()


async def test_a_relay_keeps_no_connection_to_a_node_that_it_let_go_of_while_connecting() -> None:
    relay = LeaderRelay(lambda: "")
    async with asyncio.timeout(10), running_endpoint() as node:
        sending = asyncio.create_task(
            relay.send(node.url, "POST", "/", (), b"", mark=b"", place=b"")
        )
        await asyncio.sleep(0)
        pool = relay._pools[node.url]
        for port in range(MAX_NODES):
            relay._pool(f"http://127.0.0.1:{port + 1}")
        assert node.url not in relay._pools
        with await sending as response:
            assert await response.read_all(100) == b"{}"
        assert pool.idle == 0
        await relay.close()


async def test_a_relay_that_is_closed_has_no_watch_left() -> None:
    relay = LeaderRelay(lambda: "http://127.0.0.1:2")
    others = asyncio.all_tasks()
    relay.watch("http://127.0.0.1:1")
    watches = asyncio.all_tasks() - others
    await asyncio.sleep(0)
    await relay.close()
    assert len(watches) == 1
    assert all(one.done() for one in watches)
