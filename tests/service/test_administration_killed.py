"""A service that is killed while it is changed: whatever it has answered holds."""

from __future__ import annotations

import http.client
import random
import signal
import threading
import time
from pathlib import Path

from service.support import ServiceProcess, running_service, wait_until

KILLS = 2
SETTINGS = """
[scheduler]
max_inflight = 5
[projects.a]
[targets.echo]
kind = "callable"
entry_point = "headgate.executors.callable:echo"
"""


def change_for_long(service: ServiceProcess, answered: list[int], asked: list[int]) -> None:
    """Change a weight again and again, and note what was answered, until nobody answers."""
    while True:
        asked.append((asked[-1] if asked else 0) + 1)
        try:
            answer = service.ask("PATCH", "/projects/a", {"creditWeight": asked[-1]}, seconds=5.0)
        except (OSError, http.client.HTTPException):
            return
        if answer.status == 200:
            answered.append(asked[-1])


def test_a_change_that_was_answered_survives_a_kill_and_none_is_half_made(tmp_path: Path) -> None:
    settings = tmp_path / "headgate.toml"
    settings.write_text(SETTINGS)
    draws = random.Random(1)
    answered: list[int] = [0]
    asked: list[int] = []
    with running_service(tmp_path, "--config", str(settings)) as service:
        for _ in range(KILLS):
            changing = threading.Thread(target=change_for_long, args=(service, answered, asked))
            before = len(answered)
            changing.start()
            wait_until(lambda: len(answered) > before, seconds=30.0)  # noqa: B023
            time.sleep(draws.random() / 20)
            service.kill()
            changing.join()
            service.start()
            weight = service.ask("GET", "/projects/a").body["creditWeight"]
            assert answered[-1] <= weight <= asked[-1]
            latest = service.ask("GET", "/audit?limit=1").body["entries"][0]
            assert latest["detail"]["projects.a.credit_weight"]["to"] == weight


def test_a_signal_reloads_and_a_wrong_file_is_told_of_in_the_log(tmp_path: Path) -> None:
    settings = tmp_path / "headgate.toml"
    settings.write_text(SETTINGS)

    def inflight() -> int:
        return int(service.ask("GET", "/scheduler/stats").body["config"]["maxInflight"])

    with running_service(tmp_path, "--config", str(settings)) as service:
        settings.write_text(SETTINGS.replace("= 5", "= 6"))
        service.send(signal.SIGHUP)
        wait_until(lambda: inflight() == 6, seconds=20.0, what=service.output)
        settings.write_text(SETTINGS.replace("= 5", "= 'x'"))
        service.send(signal.SIGHUP)
        line = "scheduler.max_inflight: must be a whole number"
        wait_until(lambda: line in service.output(), seconds=20.0, what=service.output)
        assert inflight() == 6
        # The file is looked at, too; nobody has to send anything.
        settings.write_text(SETTINGS.replace("= 5", "= 7"))
        wait_until(lambda: inflight() == 7, seconds=30.0, what=service.output)
