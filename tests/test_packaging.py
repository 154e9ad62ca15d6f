"""What is built, and runs on a system of its own: the two archives, the systemd unit."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import headgate
from headgate.cli.main import EXIT_BAD_INPUT
from headgate.config.settings import SchedulerSettings
from headgate.extras import EXTRAS

ROOT = Path(__file__).parent.parent
UNIT = ROOT / "deploy/headgate.service"
NAME = f"headgate-{headgate.__version__}"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the source archive with the build backend itself, without a network."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return folder


def wheel_names(archives: Path) -> set[str]:
    with zipfile.ZipFile(archives / f"{NAME}-py3-none-any.whl") as wheel:
        return set(wheel.namelist())


def metadata(archives: Path) -> Message:
    with zipfile.ZipFile(archives / f"{NAME}-py3-none-any.whl") as wheel:
        return Parser().parsestr(wheel.read(f"{NAME}.dist-info/METADATA").decode())


def test_the_wheel_has_the_package_whole_and_nothing_else(archives: Path) -> None:
    source = {
        f"headgate/{path.relative_to(ROOT / 'src/headgate')}"
        for path in (ROOT / "src/headgate").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = wheel_names(archives)
    assert {name for name in names if not name.startswith(f"{NAME}.dist-info/")} == source
    assert "headgate/py.typed" in names
    assert f"{NAME}.dist-info/licenses/LICENSE" in names


def test_the_metadata_says_what_a_stranger_needs(archives: Path) -> None:
    found = metadata(archives)
    assert found["Version"] == headgate.__version__
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    required = [line for line in found.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert {re.split(r"[<>=]", line)[0] for line in required} == {
        *("apsw", "click", "genai-prices", "httpcore2", "httptools", "httpx2", "jinja2", "msgspec"),
        *("prometheus-client", "pyyaml", "rich", "ssrfguard", "structlog", "textual", "uvloop"),
    }
    extras = {"bench", "dev", *EXTRAS.values()}
    assert set(found.get_all("Provides-Extra") or []) >= extras


def test_the_command_of_the_wheel_is_the_one_that_runs_here(archives: Path) -> None:
    with zipfile.ZipFile(archives / f"{NAME}-py3-none-any.whl") as wheel:
        entry = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert "headgate = headgate.__main__:main" in entry


def test_the_source_archive_has_what_is_needed_to_test_and_deploy_it(archives: Path) -> None:
    with tarfile.open(archives / f"{NAME}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = (
        "LICENSE",
        "Makefile",
        "constraints.txt",
        "CONTRIBUTING.md",
        "deploy/headgate.service",
    )
    assert names >= {*wanted, "docs/index.md", "tests/test_packaging.py", "pyproject.toml"}
    assert not any("__pycache__" in name or ".venv" in name for name in names)


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def test_the_unit_gives_a_stop_longer_than_the_service_takes() -> None:
    service = unit()["Service"]
    assert int(service["TimeoutStopSec"]) >= 2 * SchedulerSettings().drain_seconds
    assert service["KillSignal"] == "SIGTERM"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_the_unit_does_not_restart_what_cannot_start() -> None:
    service = unit()["Service"]
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(EXIT_BAD_INPUT)


def test_the_unit_bounds_what_the_service_may_take_and_touch() -> None:
    service = unit()["Service"]
    for key in ("MemoryMax", "TasksMax", "LimitNOFILE"):
        assert service[key]
    for key in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectHome"):
        assert service[key] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert f"--data /var/lib/{service['StateDirectory']}" in service["ExecStart"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    # It looks whether the program is there, and it is elsewhere here.
    copy = tmp_path / "headgate.service"
    copy.write_text(UNIT.read_text().replace("/opt/headgate/bin/headgate", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
