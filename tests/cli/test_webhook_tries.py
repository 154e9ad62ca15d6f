"""`headgate webhooks show`: the latest tries as a table, newest first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_json_lines import WEBHOOK
from client.scripted_server import response, scripted
from headgate.cli.main import run


def test_one_webhook_is_shown_with_its_latest_tries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "nothing"))
    tries = [
        {"at": "2020-01-15T08:00:00Z", "durationMs": 10_000, "error": "cannot be reached"},
        {"at": "2020-01-15T08:00:15Z", "durationMs": 7, "status": 500, "answer": "no\x1b[2J luck"},
    ]
    answer = response(200, json.dumps({**WEBHOOK, "latestTries": tries}))
    with scripted(answer) as server:
        assert run(["webhooks", "show", "msg_1", "--url", server.url]) == 0
    *_, title, header, second, first = capsys.readouterr().out.rstrip().split("\n")
    assert (title, header.split()[0]) == ("Latest tries", "tried")
    assert second.split()[3:] == ["500", "7", "ms", "no\\x1b[2J", "luck"]
    assert first.split()[3:] == ["cannot", "be", "reached", "10000", "ms"]
