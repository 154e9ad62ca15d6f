"""`headgate up --json`: a program that starts a service learns where it is from one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from headgate import SyncClient
from headgate.storage.tokens import read_token
from service.support import environment


def test_one_line_says_where_the_service_and_its_token_are(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "headgate", "up", "--json", "--port", "0", "--data", str(data)]
    for _ in range(2):
        with subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            started = json.loads(process.stdout.readline())
            token = Path(started["tokenFile"]).read_text().strip()
            with SyncClient(started["address"], token=token) as client:
                assert client.ready().role == started["role"] == "dispatcher"
                assert len(client.list_tokens().tokens) == 1
            process.send_signal(signal.SIGTERM)
            assert process.stdout.read() == ""
            assert process.wait(20.0) == 0
        assert read_token(token) is not None
        assert token not in json.dumps(started)
