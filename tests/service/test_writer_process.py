"""The process that writes to the store, as part of a real service."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from headgate.storage.data_lock import LOCK_NAME
from service.support import Gate, running_service, wait_until
from service.test_failures import SOON_SECONDS, Clients, check_recovery, under_load
from service.test_up import DRAINING

KILLS = 3
SETTINGS = """
[scheduler]
max_queue_size = 100_000
max_per_agent = 100_000

[store]
process = {process}

[targets.python]
kind = "callable"
entry_point = "service.work:run"
"""


def settings(folder: Path, *, process: bool) -> str:
    path = folder / "headgate.toml"
    path.write_text(SETTINGS.format(process=str(process).lower()))
    return str(path)


def has_taken(clients: Clients, tasks: int) -> bool:
    return len(clients.acknowledged) >= tasks


def test_a_writer_that_is_killed_under_load_loses_nothing_and_comes_back(tmp_path: Path) -> None:
    with running_service(tmp_path, "--config", settings(tmp_path, process=True)) as service:
        gate = Gate(tmp_path / "go on")
        running = service.submit(params=gate.params)
        service.wait_for(running, "running")
        with under_load(service) as clients:
            for _ in range(KILLS):
                wanted = len(clients.acknowledged) + 50
                killed = service.writer_pid
                os.kill(killed, signal.SIGKILL)
                wait_until(partial(has_taken, clients, wanted), seconds=SOON_SECONDS)
                assert service.writer_pid != killed
            check_recovery(service, clients, running=running, gate=gate)
        refused = {answer.status for answer in clients.answers} - {202}
        assert refused <= {503}


def test_the_writer_keeps_the_lock_and_sits_out_a_ctrl_c(tmp_path: Path) -> None:
    with running_service(tmp_path, "--config", settings(tmp_path, process=True)) as service:
        writer = service.writer_pid
        links = [str(path.readlink()) for path in Path(f"/proc/{writer}/fd").iterdir()]
        assert str(tmp_path / "data" / LOCK_NAME) in links
        gate = Gate(tmp_path / "go on")
        task = service.submit(params=gate.params)
        service.wait_for(task, "running")
        for pid in service.pids:
            os.kill(pid, signal.SIGINT)
        wait_until(lambda: DRAINING in service.output(), seconds=SOON_SECONDS)
        gate.open()
        assert service.wait() == 0
        service.start()
        # It ran to its end, and its end was written, after the signal.
        assert service.task(task)["state"] == "done"


@pytest.mark.parametrize("process", [True, False])
def test_a_service_has_a_writer_of_its_own_if_it_is_told_to(
    tmp_path: Path, *, process: bool
) -> None:
    with running_service(tmp_path, "--config", settings(tmp_path, process=process)) as service:
        assert len(service.pids) == 1 + process
        service.wait_for(service.submit(), "done")
        assert service.stop() == 0
