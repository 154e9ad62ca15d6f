"""Key slots as a newcomer meets them: the command line, a service, and providers over HTTP.

Two fake providers serve: one whose window lasts, and one whose quota is used up for some seconds.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cli.said import Command, Said
from headgate.cli.main import run
from service.fake_providers import fake_provider, requests_of
from service.support import ECHO_TARGET, ServiceProcess, running_service, wait_until

KEY = "sk-no-key-of-anybody"
USED_UP_MINUTES = 0.1
SETTINGS = (
    ECHO_TARGET
    + """
[[slots]]
name = "lasting"
provider = "zai"
base_url = "{lasting}"
key_env = "SLOT_KEY"
wake_modes = ["interval", "after_reset"]

[[slots]]
name = "used-up"
provider = "zai"
base_url = "{used_up}"
key_env = "SLOT_KEY"
"""
)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOT_KEY", KEY)


@pytest.fixture
def headgate(capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: object) -> Said:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Said(code, out, err)

    return call


def wait_for_slot(headgate: Command, service: ServiceProcess, name: str, **wanted: object) -> Any:
    """Wait until a slot is as it is wanted, and return all that the command tells of it."""

    def is_so() -> bool:
        found = service.ask("GET", f"/slots/{name}").body
        return all(found.get(field) == value for field, value in wanted.items())

    wait_until(is_so, seconds=20, what=service.output)
    return headgate("slot", "show", name, "--json", "--url", service.address).json


def test_a_slot_is_woken_confirmed_held_freed_and_survives_a_kill(
    tmp_path: Path, headgate: Command
) -> None:
    with (
        fake_provider() as lasting,
        fake_provider("--warm", "--percent", "100", "--window-minutes", str(USED_UP_MINUTES)) as up,
    ):
        settings = tmp_path / "slots.toml"
        settings.write_text(SETTINGS.format(lasting=lasting, used_up=up))
        with running_service(tmp_path, "--config", str(settings)) as service:
            task = held_task(headgate, service)
            woken(headgate, service, lasting)
            refused_and_switched(headgate, service, lasting)
            service.wait_for(task, "done", seconds=USED_UP_MINUTES * 60 + 10)
            any_slot(headgate, service)
            killed(headgate, service, lasting)
            assert requests_of(up)[1] == 0, "a slot without a mode is never woken"
            assert KEY not in service.log_path.read_text()
        assert_logged(headgate, tmp_path / "data")


def held_task(headgate: Command, service: ServiceProcess) -> str:
    """Submit a task for the slot that is used up, and see that it says so."""
    slot = wait_for_slot(headgate, service, "used-up", state="exhausted")
    there = ("--url", service.address)
    said = headgate("submit", "draft", "--agent", "writer", "--slot", "used-up", *there)
    task = said.out.strip()
    why = headgate("why", task, *there).out
    assert "slot used-up is closed: exhausted, 100% used" in why
    assert "until " in why
    (reason,) = headgate("why", task, "--json", *there).json["reasons"]
    until = datetime.fromisoformat(reason["until"])
    assert until == datetime.fromisoformat(slot["resetsAt"])
    return task


def woken(headgate: Command, service: ServiceProcess, provider: str) -> None:
    """See that the cold slot was read, woken once and read again."""
    slot = wait_for_slot(headgate, service, "lasting", state="open", wakePending=False)
    assert slot["percentUsed"] == 1
    assert slot["lastConfirmedAt"] >= slot["lastWakeAt"]
    assert slot["nextWake"]["mode"] == "interval"
    assert requests_of(provider)[1] == 1
    lines = headgate("slot", "list", "--url", service.address).out.splitlines()
    assert [line.split()[:3] for line in lines[2:4]] == [
        ["lasting", "open", "1%"],
        ["used-up", "exhausted", "100%"],
    ]
    assert "used-up is closed: exhausted, 100% used" in lines[4]


def refused_and_switched(headgate: Command, service: ServiceProcess, provider: str) -> None:
    """See that an open window is not woken, and that the switch does what it says."""
    there = ("lasting", "--url", service.address)
    refused = headgate("slot", "warm", *there)
    assert (refused.code, "the window is open until" in refused.err) == (2, True)
    answer = service.ask("POST", "/slots/lasting/warm")
    assert (answer.status, answer.body["code"]) == (409, "window_open")
    assert answer.body["details"]["resetsAt"]
    assert headgate("slot", "pause", *there).out.startswith("Slot lasting is paused")
    assert headgate("slot", "warm", *there).code == 2
    assert headgate("slot", "resume", *there).out == "Slot lasting is active.\n"
    wait_for_slot(headgate, service, "lasting", state="open")
    assert requests_of(provider)[1] == 1
    entries = service.ask("GET", "/audit?limit=2").body["entries"]
    assert [entry["action"] for entry in entries] == ["slot.enable", "slot.disable"]


def any_slot(headgate: Command, service: ServiceProcess) -> None:
    """See that a task which names a provider gets one of its slots."""
    there = ("--url", service.address)
    said = headgate("submit", "draft", "--agent", "writer", "--provider", "zai", *there)
    assert service.wait_for(said.out.strip(), "done")["slot"] in {"lasting", "used-up"}


def killed(headgate: Command, service: ServiceProcess, provider: str) -> None:
    """See that a service which is killed and started again reads the quota, and wakes nothing."""
    polls, wakes = requests_of(provider)
    before = wait_for_slot(headgate, service, "lasting", state="open", wakePending=False)
    service.kill()
    service.start()
    wait_until(lambda: requests_of(provider)[0] > polls, seconds=20, what=service.output)
    after = wait_for_slot(headgate, service, "lasting", state="open", wakePending=False)
    assert after["lastWakeAt"] == before["lastWakeAt"]
    assert requests_of(provider)[1] == wakes


def assert_logged(headgate: Command, data: Path) -> None:
    """See that every phase of the wake is in the log of slots, and no key."""
    lines = headgate("slot", "log", "lasting", "--json", "--data", data).out.splitlines()
    found = [json.loads(line) for line in lines]
    wake = [one for one in found if one["action"] == "initial-wake"]
    assert [one["phase"] for one in wake] == ["request", "response"]
    assert len({one["flow_id"] for one in wake}) == 1
    assert "quota-poller.wake-confirmed" in {one["action"] for one in found}
    assert all(KEY not in line for line in lines)


PLAN = """
[[slots]]
name = "plan"
provider = "anthropic"
base_url = "{provider}"
key_env = "SLOT_KEY"
wake_modes = ["times"]
wake_times = ["{other_hour}:00"]

[targets.model]
kind = "http"
url = "{provider}/v1/messages"
body = "input"
slot = "plan"
headers = {{ x-api-key = "{{slot.key}}" }}
default = true
"""


def test_a_plan_is_known_from_what_tasks_are_answered_and_nothing_else_is_sent(
    tmp_path: Path, headgate: Command
) -> None:
    with fake_provider() as provider:
        settings = tmp_path / "slots.toml"
        other_hour = f"{(datetime.now(UTC).hour + 12) % 24:02}"
        settings.write_text(PLAN.format(provider=provider, other_hour=other_hour))
        with running_service(tmp_path, "--config", str(settings)) as service:
            slot = wait_for_slot(headgate, service, "plan", state="unknown", quotaFrom="traffic")
            assert "nextPollAt" not in slot
            asked = {"model": "claude-haiku-4-5", "max_tokens": 1, "messages": []}
            sent = service.ask("POST", "/tasks", {"agentId": "a", "action": "ask", "input": asked})
            service.wait_for(sent.body["taskId"], "done", seconds=20)
            slot = wait_for_slot(headgate, service, "plan", state="open", percentUsed=1.0)
            assert slot["limits"][0]["type"] == "UNIFIED_LIMIT"
            assert requests_of(provider) == (0, 1)
