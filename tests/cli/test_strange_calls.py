"""Calls that nobody means well by, or that go half wrong: each has one line and its exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from client.scripted_server import response, scripted
from headgate.cli.main import run

DEEP = "[" * 100_000
NOT_UTF8 = os.fsdecode(b"a\xff")
TAKEN = response(
    202, '{"taskId":"tsk_1","state":"queued","position":1,"createdAt":"2027-01-15T08:00:00Z"}'
)
FORBIDDEN = response(
    403, '{"code":"forbidden","error":"this needs the permission read","retryable":false}'
)
NOT_FOUND = response(404, '{"code":"not_found","error":"task not found","retryable":false}')
MISSING = response(
    400,
    '{"code":"missing_field","error":"missing required field \'agentId\'","retryable":false,'
    '"details":{"field":"agentId"}}',
)


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "nothing"))
    for name in ("HEADGATE_URL", "HEADGATE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def standard_input(content: bytes, folder: Path) -> Iterator[None]:
    (folder / "input").write_bytes(content)
    before = os.dup(0)
    try:
        with (folder / "input").open("rb") as file:
            os.dup2(file.fileno(), 0)
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


def batch(*task_ids: str) -> bytes:
    entries = [{"taskId": task_id, "state": "queued", "position": 1} for task_id in task_ids]
    return response(202, json.dumps({"tasks": entries, "submitted": len(entries)}))


def test_a_task_that_is_not_there_is_not_watched_for(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(NOT_FOUND) as server:
        assert run(["watch", "nope", "--url", server.url]) == 2
    assert capsys.readouterr().err == "headgate: task not found\n"
    with scripted(FORBIDDEN) as server:
        assert run(["watch", "--url", server.url, "--token", "t"]) == 4


def test_whoever_may_not_wait_is_told_that_the_task_was_submitted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with scripted(TAKEN, FORBIDDEN) as server:
        call = ["submit", "x", "--agent", "a", "--wait", "--url", server.url, "--token", "t"]
        assert run(call) == 4
    line = "headgate: task tsk_1 was submitted; waiting: this needs the permission read\n"
    assert capsys.readouterr().err == line


def test_one_line_that_is_too_deep_does_not_keep_the_others_from_being_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = b'{"action":"x"}\n{"params":' + DEEP.encode() + b'\n{"action":"y"}\n'
    with scripted(batch("tsk_1", "tsk_2")) as server, standard_input(lines, tmp_path):
        assert run(["submit", "-", "--agent", "a", "--json", "--url", server.url]) == 1
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["line"], one.get("code")) for one in results] == [
        (1, None),
        (2, "bad_json"),
        (3, None),
    ]
    assert results[1]["error"] == "the line is nested too deeply"


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("--input", DEEP, "--input: is nested too deeply"),
        ("--params", DEEP, "--params: is nested too deeply"),
        ("--param", f"k:={DEEP}", "--param k:=: is nested too deeply"),
        ("--param", "k:=nope", "--param k:=: is not JSON"),
        ("--weight", "nan", "--weight: must be a finite number"),
        ("--weight", "inf", "--weight: must be a finite number"),
        ("--idempotency-key", "a\nb", "--idempotency-key: must be 1 to 255 visible ASCII"),
        ("--idempotency-key", "", "--idempotency-key: must be 1 to 255 visible ASCII"),
        ("--idempotency-key", "x" * 256, "--idempotency-key: must be 1 to 255 visible ASCII"),
    ],
)
def test_a_value_that_cannot_be_used_names_its_option(
    option: str, value: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted() as server:
        assert run(["submit", "x", "--agent", "a", option, value, "--url", server.url]) == 2
        assert server.requests == []
    printed = capsys.readouterr().err
    assert printed.startswith(f"headgate: {line}")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (["submit", "x", "--agent", NOT_UTF8], "--agent"),
        (["submit", NOT_UTF8, "--agent", "a"], "ACTION"),
        (["submit", "x", "--label", "k=v", "--label", f"k={NOT_UTF8}"], "--label"),
        (["show", NOT_UTF8], "TASK"),
        (["cancel", NOT_UTF8], "TASK"),
        (["token", "create", NOT_UTF8], "NAME"),
        (["stats", "--url", NOT_UTF8], "--url"),
        (["backup", NOT_UTF8], "FILE"),
        (["budget", "set", NOT_UTF8, "--limit-usd", "1"], "SCOPE"),
    ],
)
def test_an_argument_that_is_not_utf8_is_named(
    call: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(call) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"headgate: {named}: is not UTF-8 (see headgate ")


def test_a_closed_output_does_not_make_a_task_that_was_taken_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scripted(TAKEN, response(200, '{"status":"ready","role":"dispatcher"}')) as server:
        with monkeypatch.context() as closed:
            closed.setattr(sys, "stdout", None)
            closed.setattr(sys, "stderr", None)
            code = run(["submit", "x", "--agent", "a", "--url", server.url])
        assert (code, len(server.requests)) == (0, 1)


def test_a_byte_order_mark_before_the_first_line_is_passed_over(tmp_path: Path) -> None:
    lines = b'\xef\xbb\xbf{"action":"x"}\n{"action":"y"}\n'
    with scripted(batch("tsk_1", "tsk_2")) as server, standard_input(lines, tmp_path):
        assert run(["submit", "-", "--agent", "a", "--url", server.url]) == 0
    (tmp_path / "in.json").write_bytes(b'\xef\xbb\xbf{"a":1}')
    with scripted(TAKEN) as server:
        call = ["submit", "x", "--agent", "a", "--input", f"@{tmp_path / 'in.json'}"]
        assert run([*call, "--url", server.url]) == 0


def test_a_task_of_nobody_is_told_by_the_names_of_the_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with scripted(MISSING) as server:
        assert run(["submit", "x", "--url", server.url]) == 2
    line = "headgate: missing required field 'agentId'; give --agent or --project\n"
    assert capsys.readouterr().err == line


def test_a_worker_does_not_say_that_it_takes_tasks_before_it_can_run_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with scripted() as server:
        call = ["worker", "--agent", "a", "--run", "nope:nope", "--url", server.url]
        assert run(call) == 2
    assert "takes tasks" not in capsys.readouterr().err


def test_the_hint_which_tasks_may_be_meant_names_every_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["cancel"]) == 2
    assert "--older" in capsys.readouterr().err
