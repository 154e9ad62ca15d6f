"""Coding agents, SDKs and LangChain, unmodified, through the gateway.

Each asks for a plain answer, a stream and a tool; meets a failing key, a budget that is used up and
its own end; and waits in the queue for a minute and a half. A prompt tells the provider what to
answer, and gives the mark by which its bill is held against the books.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.client_processes import Ask, Client, ClientProcess, Mode
from clients.stage import (
    KEYS,
    POOR,
    WAIT_SECONDS,
    WAITS,
    Queue,
    Stage,
    booked_tokens,
    skip_unless_here,
)
from gateway.billing_upstream import TEXT, upstream_in_thread

WORDS = [f"word{index}" for index in range(30)]


def test_the_client_itself_works_with_the_provider(client: Client, tmp_path: Path) -> None:
    """What fails here is a matter of the client that is pinned, not of the gateway."""
    with upstream_in_thread() as provider:
        ask = Ask(client.base_url(provider.url), client.model, "hello", "plain", tmp_path)
        run = ClientProcess(client, ask).wait()
    assert run.code == 0, run.text
    assert TEXT in run.output


def test_it_gets_a_plain_answer_and_is_known_by_its_name(stage: Stage, client: Client) -> None:
    before = len(stage.calls(projectId="default", agentId=client.agent))
    going = stage.start(client, "hello", is_anonymous=True)
    run = going.process.wait()
    assert run.code == 0, run.text
    assert TEXT in run.output
    charges = stage.upstream.charged(mark=going.name)
    assert {charge.key for charge in charges} <= set(KEYS)
    stage.wait_until(
        lambda: len(stage.calls(projectId="default", agentId=client.agent)) == before + len(charges)
    )


def test_it_gets_a_stream(stage: Stage, client: Client) -> None:
    going = stage.start(client, f"[[words {len(WORDS)}]] [[pace 0.02]]", mode="stream")
    run = going.process.wait()
    assert run.code == 0, run.text
    assert all(word in run.output for word in WORDS)
    if client.name == "claude-code":
        lines = [json.loads(line) for line in run.output.splitlines()]
        events = [line["event"] for line in lines if line["type"] == "stream_event"]
        assert sum(event["type"] == "content_block_delta" for event in events) == len(WORDS)
    elif not client.is_agent:
        assert [line.strip() for line in run.output.splitlines()] == WORDS
    calls = stage.check_books(going)
    assert all(call["isStream"] for call in calls)


def test_it_calls_a_tool(stage: Stage, client: Client) -> None:
    going = stage.start(client, client.tool, mode="tool")
    run = going.process.wait()
    assert run.code == 0, run.text
    assert TEXT in run.output
    made = going.process.ask.folder / "made.txt"
    assert client.did_tool in (made.read_text() if client.is_agent else run.output)
    assert len(stage.check_books(going)) >= 2


@pytest.mark.parametrize("status", [429, 529])
def test_another_key_heals_what_one_key_refuses(stage: Stage, client: Client, status: int) -> None:
    going = stage.start(client, f"[[fail {status}]]")
    run = going.process.wait()
    assert run.code == 0, run.text
    assert TEXT in run.output
    (refused,) = stage.upstream.refused(mark=going.name)
    calls = stage.check_books(going)
    assert max(call["tries"] for call in calls) == 2
    assert {call["status"] for call in calls} == {200}
    charges = stage.upstream.charged(mark=going.name)
    # The client did not try again, so that each call has one charge.
    assert len(charges) == len(calls)
    assert any(charge.key != refused for charge in charges)


def test_a_refusal_is_shown_in_our_words(stage: Stage, client: Client) -> None:
    going = stage.start(client, "hello", project=POOR)
    run = going.process.wait()
    assert f"project:{POOR}" in run.text
    assert TEXT not in run.text
    assert stage.upstream.charged(mark=going.name) == []
    calls = stage.ended_calls(going)
    assert {call["state"] for call in calls} == {"refused"}
    # Whoever is told to stop stops: an agent asks once for its title and once for the answer.
    assert len(calls) <= 2


def test_a_client_that_is_killed_ends_its_call_and_is_booked(stage: Stage, client: Client) -> None:
    going = stage.start(client, "[[words 100]] [[pace 0.03]]", mode="stream")
    try:
        stage.wait_until(
            lambda: any(
                charge.output_tokens > 5 for charge in stage.upstream.charged(mark=going.name)
            )
        )
    finally:
        going.process.kill()
    calls = stage.ended_calls(going)
    charges = stage.upstream.charged(mark=going.name)
    stage.wait_until(lambda: all(charge.end != "open" for charge in charges))
    assert "cancelled" in {call["state"] for call in calls}
    assert booked_tokens(calls) >= sum(charge.tokens for charge in charges)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("client", "mode"), WAITS, ids=[f"{client.name}-{mode}" for client, mode in WAITS]
)
def test_it_waits_in_the_queue_and_is_served(
    stage: Stage, queue: Queue, client: Client, mode: Mode
) -> None:
    skip_unless_here(client)
    going = queue.waiters[client.name, mode]
    queue.release()
    run = going.process.wait()
    assert run.code == 0, run.text
    assert "served at last" in " ".join(run.output.split())
    calls = stage.check_books(going)
    # It was one call all the time: nothing gave up and asked again.
    assert len(calls) == len(stage.upstream.charged(mark=going.name))
    assert all(call["tries"] == 1 for call in calls)
    assert max(call["waitedMs"] for call in calls) >= WAIT_SECONDS * 1000


def test_no_key_of_the_provider_is_shown_anywhere(stage: Stage) -> None:
    """The clients wrote down all that they got, and the service all that it logged."""
    written = [path for path in stage.folder.rglob("*.txt") if path.is_file()]
    written.append(stage.service.log_path)
    assert [path for path in written if b"sk-canary" in path.read_bytes()] == []
