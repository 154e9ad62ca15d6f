"""The wheel of this checkout, installed into an empty environment as a user installs it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import headgate

ROOT = Path(__file__).parent.parent.parent
NOT_OF_A_USER = ("HEADGATE_", "MAKE", "MFLAGS", "PG", "PYTEST_", "PYTHON", "VIRTUAL_ENV", "XDG_")
PIP_FILES = ("~/.config/pip/pip.conf", "~/.pip/pip.conf")


class Installed(NamedTuple):
    """An environment with the wheel in it, and how long pip took, waiting and computing."""

    folder: Path
    constraints: Path
    seconds: float
    cpu_seconds: float


def install(folder: Path) -> Installed:
    """Build the wheel, make an environment, and install the one into the other."""
    dist = folder / "dist"
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = dist.glob("headgate-*.whl")
    # So that `pip install headgate` on a page keeps this wheel, whatever an index has of that name.
    constraints = folder / "constraints.txt"
    pins = (ROOT / "constraints.txt").read_text()
    constraints.write_text(f"{pins}\nheadgate=={headgate.__version__}\n")
    environment = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    started, cpu_seconds = time.monotonic(), _cpu_seconds()
    subprocess.run(
        [str(environment / "bin/pip"), "install", "-qq", str(wheel)],
        env=variables(constraints),
        check=True,
    )
    seconds = time.monotonic() - started
    return Installed(environment, constraints, seconds, _cpu_seconds() - cpu_seconds)


def _cpu_seconds() -> float:
    """Return for how long processes that were started and waited for have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def variables(constraints: Path) -> dict[str, str]:
    """Return the variables of a user who has pip as it is set up here, and nothing of Headgate."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_OF_A_USER)}
    given = [path for path in map(os.path.expanduser, PIP_FILES) if Path(path).exists()]
    if given:
        kept.setdefault("PIP_CONFIG_FILE", given[0])
    return {**kept, "PIP_CONSTRAINT": str(constraints), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def overlay(installed: Installed, folder: Path) -> Path:
    """Return an environment over the installed one, so that what a page adds is there for it alone.

    It sees all packages of the one below. What pip adds lies in its own folder.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (below,) = installed.folder.glob("lib/python*/site-packages")
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "below.pth").write_text(f"{below}\n")
    for name in ("headgate", "pip"):
        script = (installed.folder / "bin" / name).read_text().partition("\n")[2]
        copy = folder / "bin" / name
        copy.write_text(f"#!{folder}/bin/python\n{script}")
        copy.chmod(0o755)
    return folder / "bin"
