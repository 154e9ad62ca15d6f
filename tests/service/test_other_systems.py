"""Where Linux has more than other systems, a service does without, or says in one line what to do.

There is no Mac here. What macOS lacks is taken away from the interpreter of a real service, before
anything of it is loaded, and so it is in the processes that the service starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.client.local_slots import MAX_ADDRESS_BYTES, SOCKET_NAME, short_address
from headgate.storage import sqlite
from service.support import ECHO_TARGET, running_service

LACKING = """
import asyncio, os, pathlib, sys, urllib.request, uvloop
for name in ("pidfd_open", "posix_fallocate", "sched_getaffinity", "memfd_create", "pipe2"):
    if hasattr(os, name):
        delattr(os, name)
import headgate.executors.confinement
headgate.executors.confinement._PROC = pathlib.Path("/nowhere")
which = headgate.executors.confinement.shutil.which
headgate.executors.confinement.shutil.which = (
    lambda name, *given, **named: None if name == "setpriv" else which(name, *given, **named)
)
sys.platform = "darwin"
"""
SETTINGS = f"""{ECHO_TARGET}
[targets.shell]
kind = "command"
command = ["/bin/sh", "-c", "sleep 600 & echo done"]

[targets.slow]
kind = "command"
command = ["/bin/sh", "-c", "sleep 600"]
kill_grace_seconds = 0.1
"""


def test_a_service_runs_and_cancels_commands_without_what_linux_alone_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    (tmp_path / "headgate.toml").write_text(SETTINGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running_service(tmp_path) as service:
        assert service.wait_for(service.submit())["state"] == "done"
        done = service.wait_for(service.submit(target="shell"))
        assert (done["state"], done["result"]["stdout"]) == ("done", "done\n")
        slow = service.submit(target="slow")
        service.wait_for(slow, "running")
        service.ask("POST", f"/tasks/{slow}/cancel")
        assert service.wait_for(slow)["state"] == "cancelled"
        assert service.stop() == 0


def test_the_reserve_of_a_store_is_written_where_files_cannot_be_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    path = tmp_path / "tasks.db"
    reserve = sqlite.DiskReserve(path)
    reserve.hold(free_bytes=2**40, total_bytes=2**40)
    file = path.with_name("tasks.db-reserve")
    assert file.stat().st_size == sqlite.RESERVE_FILE_BYTES
    assert file.stat().st_blocks * 512 >= sqlite.RESERVE_FILE_BYTES
    assert reserve.give_up()


def test_a_socket_in_a_deep_folder_has_a_short_address(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with short_address(deep) as address:
        assert len(os.fsencode(address)) <= MAX_ADDRESS_BYTES
        assert not address.startswith("/proc")
        Path(address).touch()
    assert [path.name for path in deep.iterdir()] == [SOCKET_NAME]


@pytest.mark.parametrize("arguments", [["--version"], ["up"], ["run", "one.yaml"], []])
def test_on_windows_every_command_is_one_sentence(arguments: list[str]) -> None:
    code = (
        "import sys; sys.platform = 'win32'; before = set(sys.modules)\n"
        "class Nothing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in {'fcntl', 'resource', 'click', 'pwd'}:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Nothing())\n"
        "from headgate.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "headgate: Windows is not supported; run headgate in WSL (wsl --install)\n"
    )
