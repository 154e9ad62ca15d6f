"""Install the clients that the tests run into `.clients`, each into a folder of its own.

What does not install is left out, with one line that says so: its tests are skipped, and those of
the others run. What is there in the pinned version is not installed again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".clients"
PINS = Path(__file__).parent / "package.json"
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
CONSTRAINTS = ROOT / "constraints.txt"
SECONDS = 600
# The binaries are packages of their own, one for each platform. Scripts would only link them, and
# a lock would only name where they came from.
NPM_OPTIONS = ("--ignore-scripts", "--no-package-lock", "--no-audit", "--no-fund")


def folder_of(package: str) -> Path:
    """Return where a package lies, whether it is there or not."""
    return FOLDER / package.rpartition("/")[2]


def python_path() -> Path:
    """Return the interpreter that has the clients for Python."""
    return FOLDER / "python/bin/python"


def install_package(package: str, version: str) -> str | None:
    """Install a package from npm; return why not."""
    folder = folder_of(package)
    wanted = json.dumps({"private": True, "dependencies": {package: version}})
    if _is_done(folder, wanted):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text(wanted)
    return _run(folder, wanted, ["npm", "install", "--loglevel=error", *NPM_OPTIONS])


def install_requirements() -> str | None:
    """Install what comes from Python's index into an environment of its own; return why not."""
    folder = python_path().parent.parent
    wanted = REQUIREMENTS.read_text() + CONSTRAINTS.read_text()
    if _is_done(folder, wanted):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    made = _run(FOLDER, None, [sys.executable, "-m", "venv", str(folder)])
    pip = [str(python_path()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    given = ["-c", str(CONSTRAINTS), "-r", str(REQUIREMENTS)]
    return made or _run(folder, wanted, [*pip, *given])


def main() -> None:
    """Install everything, and say what could not be."""
    FOLDER.mkdir(exist_ok=True)
    pins: dict[str, str] = json.loads(PINS.read_text())["dependencies"]
    failed = {name: install_package(name, version) for name, version in pins.items()}
    failed["LangChain"] = install_requirements()
    for name, why in failed.items():
        if why is not None:
            sys.stdout.write(f"==> {name} does not install here, its tests are skipped: {why}\n")


def _is_done(folder: Path, wanted: str) -> bool:
    done = folder / "installed"
    return done.exists() and done.read_text() == wanted


def _run(folder: Path, wanted: str | None, command: list[str]) -> str | None:
    try:
        ended = subprocess.run(
            command, cwd=folder, check=False, capture_output=True, text=True, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ended.returncode != 0:
        said = (ended.stderr or ended.stdout).strip().splitlines()
        return (
            "; ".join([line for line in said if "error" in line.lower()][:2]) or "no reason given"
        )
    if wanted is not None:
        (folder / "installed").write_text(wanted)
    return None


if __name__ == "__main__":
    main()
