"""`headgate slot run`: slots alone, from the first line to a clean end, and what it refuses."""

from __future__ import annotations

import json
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from headgate.cli.connection import Connection
from headgate.cli.main import run
from headgate.cli.slot import alone_in
from headgate.cli.slots_alone import listening_in
from headgate.client.local_slots import SOCKET_NAME, SlotReporter, SlotsAlone
from headgate.storage.data_lock import hold_directory
from service.fake_providers import fake_provider, requests_of
from service.support import environment, wait_until

KEY = "sk-no-key-of-anybody"
SLOT = """
[[slots]]
name = "work"
provider = "zai"
base_url = "{provider}"
key_env = "SLOT_KEY"
wake_modes = ["after_reset"]
"""


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOT_KEY", KEY)


class Alone:
    """A process that runs slots; what it says is in a file."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._said = folder / "said"

    def said(self) -> str:
        return self._said.read_text()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.said(), seconds=20, what=self.said)

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20)


@contextmanager
def running_alone(folder: Path, *options: str) -> Iterator[Alone]:
    call = ["slot", "run", "--config", str(folder / "slots.toml"), "--data", str(folder / "data")]
    with (
        (folder / "said").open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "headgate", *call, *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Alone(folder, process)
        finally:
            process.kill()


def test_slots_run_alone_until_ctrl_c_and_a_later_run_repeats_no_wake(tmp_path: Path) -> None:
    with fake_provider() as provider:
        settings = tmp_path / "slots.toml"
        settings.write_text(SLOT.format(provider=provider))
        with running_alone(tmp_path) as alone:
            alone.wait_for("slot work wake confirmed")
            settings.write_text(SLOT.format(provider=provider) + "poll_interval_minutes = 20\n")
            alone.wait_for("slot work quota poller detected config change")
            settings.write_text("")
            alone.wait_for("the file was refused")
            assert alone.end() == 0
        assert "\x1b" not in alone.said()
        assert "slot work initial wake fired" in alone.said()
        assert KEY not in alone.said()
        settings.write_text(SLOT.format(provider=provider))
        with running_alone(tmp_path, "--json") as alone:
            alone.wait_for("slot work quota refreshed")
            assert alone.end() == 0
        lines = [json.loads(line) for line in alone.said().splitlines()]
        assert {"slot work quota poller started"} < {line["event"] for line in lines}
        assert requests_of(provider)[1] == 1


def test_a_directory_that_a_service_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "slots.toml"
    settings.write_text(SLOT.format(provider="http://127.0.0.1:1"))
    with hold_directory(tmp_path, address="http://127.0.0.1:7420"):
        assert run(["slot", "run", "--config", str(settings), "--data", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "which serves http://127.0.0.1:7420" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("has_file", [True, False])
def test_settings_without_slots_say_what_to_write(
    has_file: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if has_file:
        (tmp_path / "headgate.toml").write_text("")
    assert run(["slot", "run", "--data", str(tmp_path / "data")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("headgate: slots: ")
    assert "write [[slots]]" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "data").exists()


def script(provider: str, **step: object) -> None:
    request = Request(f"{provider}/fake/next", data=json.dumps(step).encode(), method="POST")
    with urlopen(request, timeout=10) as response:
        response.read()


def asked(capsys: pytest.CaptureFixture[str], data: Path, *call: str) -> tuple[int, str]:
    """Run a command about slots beside the process that runs them; return what it said."""
    code = run(["slot", *call, "--data", str(data)])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_commands_work_beside_slots_that_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A path longer than the address of a socket may be.
    folder = tmp_path / ("deep" * 30)
    folder.mkdir()
    data = folder / "data"
    with fake_provider() as provider:
        (folder / "slots.toml").write_text(SLOT.format(provider=provider))
        with running_alone(folder) as alone:
            alone.wait_for("slot work wake confirmed")
            code, said = asked(capsys, data, "list", "--json")
            assert (code, json.loads(said)["state"]) == (0, "open")
            code, said = asked(capsys, data, "show", "work")
            assert code == 0
            assert "after_reset" in said
            code, said = asked(capsys, data, "warm", "work")
            assert code == 2
            assert "the window is open until" in said
            assert asked(capsys, data, "show", "other")[0] == 2
            assert "Slot work is paused" in asked(capsys, data, "pause", "work")[1]
            assert asked(capsys, data, "resume", "work") == (0, "Slot work is active.\n")
            mode = (data / SOCKET_NAME).stat().st_mode
            assert stat.S_IMODE(mode) == 0o600
            assert alone.end() == 0
        assert not (data / SOCKET_NAME).exists()


@pytest.mark.parametrize("kind", ["401", "403"])
def test_a_slot_whose_key_was_refused_can_be_resumed_beside_slots_that_run_alone(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    with fake_provider() as provider:
        script(provider, kind=kind)
        (tmp_path / "slots.toml").write_text(SLOT.format(provider=provider))
        with running_alone(tmp_path) as alone:
            alone.wait_for(f"the provider refused the key ({kind})")
            code, said = asked(capsys, data, "show", "work")
            assert code == 0
            assert f"the provider refused the key ({kind})" in said
            assert asked(capsys, data, "resume", "work") == (0, "Slot work is active.\n")
            alone.wait_for("slot work wake confirmed")


def test_a_socket_that_a_crash_left_behind_is_nobody(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left, chdir(tmp_path):
        left.bind(SOCKET_NAME)
    assert alone_in(Connection(data=tmp_path)) is None
    listening = listening_in(tmp_path)
    assert listening is not None
    listening.close()


PLAN = """
[[slots]]
name = "plan"
provider = "anthropic"
base_url = "{provider}"
key_env = "SLOT_KEY"
"""


def test_a_program_tells_slots_that_run_alone_what_its_own_responses_say(tmp_path: Path) -> None:
    with fake_provider() as provider:
        (tmp_path / "slots.toml").write_text(PLAN.format(provider=provider))
        with running_alone(tmp_path) as alone:
            alone.wait_for("slot plan quota poller started")
            asked = SlotsAlone(tmp_path / "data")
            wait_until((tmp_path / "data" / SOCKET_NAME).exists, seconds=20)
            assert asked.slot("plan").state == "unknown"
            reporter = SlotReporter("plan", data=tmp_path / "data")
            prefix = "Anthropic-RateLimit-Unified-5h"
            told = {f"{prefix}-Utilization": "0.25", f"{prefix}-Reset": "3600"}
            reporter(200, {**told, "Set-Cookie": "none of anybody's"})
            reporter.close()
            wait_until(lambda: asked.slot("plan").percent_used == 25.0, seconds=20)
            assert asked.slot("plan").state == "open"
            assert alone.end() == 0
        assert requests_of(provider) == (0, 0)


def test_a_reporter_that_reaches_nobody_fails_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = SlotReporter("plan", data=tmp_path)
    for _ in range(3):
        reporter(200, {"x-ratelimit-remaining-tokens": "1"})
    reporter(200, {"content-type": "text/plain"})
    reporter.close()
    assert caplog.text.count("cannot be reported") == 1
