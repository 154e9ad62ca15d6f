"""`headgate slot set` and `drain`, `target set`: what is changed beside the file of a service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cli.said import Command, Said
from headgate.cli.main import run
from service.support import ECHO_TARGET, running_service

SLOT = """
[[slots]]
name = "work"
provider = "zai"
base_url = "http://127.0.0.1:1"
key_file = "{folder}/key"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[object, ...]]:
    """Run a service with a slot, and return the options that find it."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "key").write_text("k-1")
    settings = folder / "headgate.toml"
    settings.write_text(ECHO_TARGET + SLOT.format(folder=folder))
    data = str(folder / "data")
    with running_service(folder, "--config", str(settings), "--data", data) as process:
        yield ("--url", process.address, "--data", data)


@pytest.fixture
def admin(place: tuple[object, ...], capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: object) -> Said:
        capsys.readouterr()
        code = run([str(argument) for argument in (*arguments, *place)])
        out, err = capsys.readouterr()
        return Said(code, out, err)

    return call


def test_a_slot_is_set_and_drained(admin: Command) -> None:
    assert admin("slot", "set", "work", "--max-inflight", "4").out == (
        "Slot work takes at most 4 tasks and calls at a time.\n"
    )
    shown = admin("slot", "show", "work", "--json").json
    assert (shown["maxInflight"], shown["overridden"]) == (4, ["maxInflight"])
    assert "at most 4" in admin("slot", "show", "work").out
    assert admin("slot", "set", "work", "--reset", "max-inflight").out == (
        "Slot work takes any number of tasks and calls at a time.\n"
    )
    assert admin("slot", "drain", "work").out == (
        "Slot work is paused: nothing is sent with its key; what runs with it finishes. "
        "headgate slot resume work ends this.\n"
    )
    assert admin("slot", "show", "work", "--json").json["state"] == "paused"
    assert admin("slot", "resume", "work").out == "Slot work is active.\n"
    refused = admin("slot", "set", "wrok", "--max-inflight", "4")
    assert (refused.code, "did you mean work?" in refused.err) == (2, True)
    assert admin("slot", "set", "work").code == 2


def test_a_target_is_set_and_reset(admin: Command) -> None:
    changed = admin("target", "set", "echo", "--slot", "work", "--estimate-usd", "0.02", "--json")
    assert (changed.json["slot"], changed.json["estimateUsd"]) == ("work", "0.02")
    assert "slot" in admin("target", "show", "echo").out
    taken = admin("target", "set", "echo", "--slot", "none", "--reset", "estimate-usd", "--json")
    assert (taken.json["slot"], taken.json["estimateUsd"]) == (None, None)
    refused = admin("target", "set", "echo", "--slot", "wrok")
    line = "headgate: slot: there is no slot 'wrok'. Slots: work\n"
    assert (refused.code, refused.err) == (2, line)
    assert admin("target", "set", "echo", "--reset", "slot").code == 0
