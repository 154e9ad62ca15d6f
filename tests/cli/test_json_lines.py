"""With `--json` a list is one object a line, whatever it is a list of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client.scripted_server import response, scripted
from headgate.cli.main import run

AT = "2027-01-15T08:00:00Z"
CHANGE = {
    "seq": 1,
    "at": AT,
    "actor": "op",
    "tokenId": "t1",
    "requestId": "r1",
    "action": "x.patch",
    "subject": "x",
    "detail": {},
}
TOKEN = {"id": "t1", "name": "ci", "permissions": ["read"], "state": "good", "createdAt": AT}
WEBHOOK = {
    "id": "msg_1",
    "taskId": "tsk_1",
    "url": "https://hooks.example/",
    "event": "task.completed",
    "state": "dead",
    "tries": 3,
    "createdAt": AT,
    "dueAt": None,
    "endedAt": None,
    "status": None,
    "error": None,
}
SECRET = {"secret": "whsec_1", "createdAt": AT}


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("call", "name", "one"),
    [
        ("audit", "entries", CHANGE),
        ("token list", "tokens", TOKEN),
        ("webhooks list", "webhooks", WEBHOOK),
        ("webhooks secret", "secrets", SECRET),
    ],
)
def test_a_list_is_one_object_a_line(
    call: str, name: str, one: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(response(200, json.dumps({name: [one, one], "count": 2}))) as server:
        code = run([*call.split(), "--json", "--url", server.url])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert len(lines) == 2
    given = {key: value for key, value in one.items() if value is not None}
    assert given.items() <= lines[0].items()


@pytest.mark.parametrize("further", [(), ("--all",)])
def test_a_table_of_tasks_asks_for_nothing_that_it_has_no_column_for(
    further: tuple[str, ...],
) -> None:
    page = response(200, json.dumps({"tasks": [], "count": 0}))
    with scripted(page, page) as server:
        assert run(["tasks", *further, "--url", server.url]) == 0
        assert run(["tasks", *further, "--json", "--url", server.url]) == 0
    table, lines = (request.split()[1] for request in server.requests)
    assert "omit=params%2Cinput%2Cresult" in table
    assert "omit" not in lines


@pytest.mark.parametrize(
    ("call", "one"), [("token revoke", TOKEN), ("webhooks redeliver", WEBHOOK)]
)
def test_what_is_done_to_several_is_one_object_a_line(
    call: str, one: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = response(200, json.dumps(one))
    with scripted(answer, answer) as server:
        ids = ("de840178a0e4", "0f3ebff00d52")
        assert run([*call.split(), *ids, "--json", "--url", server.url]) == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 2


def test_a_page_of_webhooks_that_is_not_the_last_says_so_beside_the_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = {"webhooks": [WEBHOOK], "count": 1, "nextCursor": "msg_0"}
    with scripted(response(200, json.dumps(page))) as server:
        assert run(["webhooks", "list", "--json", "--url", server.url]) == 0
    assert "--cursor msg_0" in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "done"), [("cancel", "cancelled"), ("retry", "retried")])
def test_many_tasks_at_once_are_counted_by_the_names_of_the_api(
    verb: str, done: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [
        {"matched": 5},
        {"matched": 5, done: 2, "skipped": 1, "remaining": 2},
        {"matched": 2, done: 2, "skipped": 0, "remaining": 0},
    ]
    with scripted(*(response(200, json.dumps(one)) for one in rounds)) as server:
        assert run([verb, "--agent", "a", "--yes", "--json", "--url", server.url]) == 0
    counts = {"matched": 5, done: 4, "skipped": 1, "remaining": 0}
    assert json.loads(capsys.readouterr().out) == counts
