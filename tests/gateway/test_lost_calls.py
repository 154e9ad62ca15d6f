"""What a crash leaves of calls that ran: a row that says so, whether a budget held money or not."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from gateway.gateway_service import CHAT, GatewayService, gateway_service
from headgate.storage.call_rows import LOST


def store_in(folder: Path) -> str:
    return f"sqlite:///{folder / 'headgate.db'}"


def copied(source: Path, target: Path) -> None:
    """Copy a database as it is at this moment: what a process that is killed now leaves behind."""
    target.mkdir()
    with (
        sqlite3.connect(source / "headgate.db") as one,
        sqlite3.connect(target / "headgate.db") as other,
    ):
        one.backup(other)
    one.close()
    other.close()


async def noted(gateway: GatewayService) -> None:
    """Have the store know what runs."""
    await gateway.until(lambda: any(one.state.value == "running" for one in gateway.calls.live()))
    for call in gateway.calls._live.values():
        call.change(started_at=(call.record.started_at or 0.0) - 10.0)
    await gateway.calls.note_running()


async def test_a_call_that_ran_when_the_service_was_killed_is_listed(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    async with gateway_service(tmp_path / "one", store=store_in(tmp_path / "one")) as gateway:
        running = gateway.start(CHAT, "[[until later]]")
        await noted(gateway)
        (record,) = gateway.calls.live()
        copied(tmp_path / "one", tmp_path / "two")
        gateway.upstream.releases.add("later")
        assert (await running).status_code == 200
        await gateway.until_idle()
        whole = (await gateway.client.get("/calls")).json()["calls"]
        assert [one["state"] for one in whole] == ["done"]
    copied(tmp_path / "one", tmp_path / "three")
    for folder, state in (("two", "failed"), ("three", "done")):
        async with gateway_service(tmp_path / folder, store=store_in(tmp_path / folder)) as gateway:
            await gateway.calls.end_lost(seen_before=gateway.service.engine.now())
            (shown,) = (await gateway.client.get("/calls")).json()["calls"]
            assert (shown["callId"], shown["state"]) == (record.id, state)
            assert shown.get("error") == (LOST if state == "failed" else None)
            used = (await gateway.client.get("/usage")).json()["total"]
            assert (used["calls"], used["tokens"]) == (1, shown["usage"]["tokens"])
            assumed = record.reserved_tokens if state == "failed" else 0
            assert used["assumedTokens"] == shown["usage"].get("assumedTokens", 0) == assumed


async def test_a_call_that_was_taken_for_lost_ends_as_it_does(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, store=store_in(tmp_path)) as gateway:
        running = gateway.start(CHAT, "[[until later]]")
        await noted(gateway)
        now = gateway.service.engine.now()
        await gateway.calls.end_lost(seen_before=now + 1)
        assert gateway.service.engine.call_store is not None
        assert not await gateway.service.engine.call_store.end_lost(now - 60, without=())
        assert await gateway.service.engine.call_store.end_lost(now + 60, without=())
        gateway.upstream.releases.add("later")
        answer = await running
        record = await gateway.record(answer)
        kept = await gateway.service.engine.call_store.get(record.id)
        assert kept is not None
        assert (kept.state.value, kept.tokens) == ("done", gateway.upstream.bill[-1].tokens)


async def test_what_was_refused_is_no_usage(tmp_path: Path) -> None:
    """It had its turn, and then nobody could read a key for it."""
    async with gateway_service(tmp_path, environ={}) as gateway:
        refused = await gateway.ask(CHAT)
        assert refused.status_code == 401, refused.text
        record = await gateway.record(refused)
        assert record.state.value == "refused"
        used = (await gateway.client.get("/usage")).json()
        assert used["total"]["calls"] == 0
