"""Many tasks are submitted while the service is killed: each line becomes exactly one task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from executors.endpoint import free_port
from headgate import SyncClient
from service.support import running_service, wait_until

LINES = 250
SETTINGS = """
[scheduler]
max_queue_size = 10000
max_per_agent = 10000
[projects.default]
status = "paused"
"""


def test_each_line_becomes_one_task_though_the_service_is_killed(tmp_path: Path) -> None:
    (tmp_path / "headgate.toml").write_text(SETTINGS)
    with running_service(tmp_path, port=free_port()) as service:
        submitting = subprocess.Popen(
            [sys.executable, "-m", "headgate", "submit", "-", "--patient", "--json"],
            env={**os.environ, "HEADGATE_URL": service.address, "XDG_DATA_HOME": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with submitting:
            results: list[bytes] = []
            assert submitting.stdin is not None
            assert submitting.stdout is not None
            reader = threading.Thread(target=results.extend, args=(submitting.stdout,))
            reader.start()
            for number in range(LINES):
                task = {"agentId": "a", "action": "x", "labels": {"n": str(number)}}
                submitting.stdin.write(json.dumps(task).encode() + b"\n")
                if number % 200 == 100:
                    submitting.stdin.flush()
                    seen = len(results)
                    wait_until(lambda seen=seen: len(results) > seen, seconds=20)  # type: ignore[misc]
                    service.kill()
                    service.start()
            submitting.stdin.close()
            assert submitting.wait(60) == 0
            reader.join()
        told = [json.loads(line)["taskId"] for line in results]
        with SyncClient(service.address) as client:
            kept = {task.task_id: task.labels["n"] for task in client.iterate_tasks(state="queued")}
    assert len(told) == LINES
    assert set(told) == set(kept)
    assert sorted(kept.values(), key=int) == [str(number) for number in range(LINES)]
