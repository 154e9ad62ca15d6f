"""`headgate init` writes a file that a service starts with, and asks nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from itertools import chain, combinations
from pathlib import Path

import pytest

from headgate.cli.main import run
from service.support import ServiceProcess, running_service

FLAGS = ("--gateway", "--slots", "--postgres")
CHOICES = list(chain.from_iterable(combinations(FLAGS, count) for count in range(len(FLAGS) + 1)))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def does_a_task(service: ServiceProcess) -> bool:
    return bool(service.wait_for(service.submit())["state"] == "done")


@pytest.mark.parametrize("flags", CHOICES, ids=lambda flags: "".join(flags) or "alone")
def test_a_service_starts_with_the_file_whatever_was_asked_for(
    flags: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("headgate.toml: written", "  next: headgate up")
    assert run(["config", "check"]) == 0
    assert capsys.readouterr().err == ""
    with running_service(here) as service:
        assert does_a_task(service)


def test_a_service_starts_with_the_example(here: Path) -> None:
    command = [sys.executable, "-m", "headgate", "config"]
    example = subprocess.run([*command, "example"], capture_output=True, check=True)
    subprocess.run([*command, "check"], input=example.stdout, capture_output=True, check=True)
    (here / "headgate.toml").write_bytes(example.stdout)
    with running_service(here) as service:
        assert does_a_task(service)


def test_the_file_has_what_was_asked_for_and_is_small(here: Path) -> None:
    assert run(["init"]) == 0
    small = (here / "headgate.toml").read_text()
    assert set(tomllib.loads(small)) == {"server", "scheduler"}
    assert len(small.splitlines()) < 40
    assert run(["init", *FLAGS, "--force"]) == 0
    whole = (here / "headgate.toml").read_text()
    assert {"gateway", "upstreams", "models", "quota", "store"} <= set(tomllib.loads(whole))
    assert "\n# [[slots]]\n" in whole


def test_a_file_that_is_there_is_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "headgate.toml").write_text("mine")
    assert run(["init"]) == 2
    assert capsys.readouterr().err == (
        "headgate: --config: headgate.toml exists; give --force to replace it, "
        "or name another file\n"
    )
    assert (here / "headgate.toml").read_text() == "mine"


def test_another_file_can_be_named_and_is_told_as_json(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init", "--config", "my settings.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": "my settings.toml",
        "next": ["headgate up --config 'my settings.toml'"],
    }
    assert run(["config", "check", "my settings.toml"]) == 0


def test_a_folder_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "--config", "nowhere/headgate.toml"]) == 2
    assert capsys.readouterr().err == (
        "headgate: --config: nowhere/headgate.toml cannot be written: "
        "No such file or directory; name another file\n"
    )
