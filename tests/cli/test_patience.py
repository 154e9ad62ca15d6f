"""`headgate submit --patient` goes on until there is room, and makes no task twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest

from client.scripted_server import response, scripted
from headgate.cli.main import run
from headgate.core.retries import Backoff

NO_TIME = Backoff(base_seconds=0.001, max_seconds=0.002)
TAKEN = response(
    202, '{"taskId":"tsk_1","state":"queued","position":1,"createdAt":"2027-01-15T08:00:00Z"}'
)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("headgate.client.responses.BACKOFF", NO_TIME)
    monkeypatch.setattr("headgate.cli.submit_lines.BACKOFF", NO_TIME)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "nothing"))


@pytest.mark.parametrize("given", [None, "mine"])
def test_a_patient_submit_keeps_its_key_in_every_round(given: str | None) -> None:
    lost_in_the_first_round = [b""] * 4
    with scripted(*lost_in_the_first_round, TAKEN) as server:
        own = [] if given is None else ["--idempotency-key", given]
        call = ["submit", "x", "--agent", "a", "--deadline", "1h", "--patient", *own]
        assert run([*call, "--url", server.url]) == 0
        keys = server.headers("idempotency-key")
        bodies = {request.partition("\r\n\r\n")[2] for request in server.requests}
    assert len(keys) == 5
    assert len(set(keys)) == 1
    assert given in (None, keys[0])
    assert len(bodies) == 1


def batch(*states: str) -> bytes:
    refused = {"code": "queue_full", "error": "full", "retryable": True}
    entries = [
        {"taskId": f"tsk_{state}", "state": state, **(refused if state == "rejected" else {})}
        for state in states
    ]
    return response(202, json.dumps({"tasks": entries, "submitted": states.count("queued")}))


@contextmanager
def standard_input(path: Path) -> Iterator[None]:
    before = os.dup(0)
    try:
        with path.open("rb") as file:
            os.dup2(file.fileno(), 0)
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


def test_while_there_is_no_room_one_line_at_a_time_asks_for_it(tmp_path: Path) -> None:
    # Each line that is refused is kept as a rejected task; rounds of all lines would make heaps.
    answers = [
        batch(*["rejected"] * 5),
        batch("rejected"),
        batch("queued"),
        batch("queued", "queued"),
        batch("queued", "queued"),
    ]
    lines = b"".join(b'{"agentId":"a","action":"x%d"}\n' % number for number in range(5))
    (tmp_path / "lines").write_bytes(lines)
    with scripted(*answers) as server, standard_input(tmp_path / "lines"):
        assert run(["submit", "-", "--patient", "--url", server.url]) == 0
        bodies = [json.loads(request.partition("\r\n\r\n")[2]) for request in server.requests]
    sent = [[task["action"] for task in body["tasks"]] for body in bodies]
    assert [len(one) for one in sent] == [5, 1, 1, 2, 2]
    assert list(chain(*sent[2:])) == [f"x{number}" for number in range(5)]
