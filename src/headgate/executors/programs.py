"""Programs on this machine: where that of a command lies, and how its life is tied to ours.

Children lead groups of their own, so nothing ends them when the service is killed outright. On
Linux `setpriv` asks the kernel for it and then becomes the command. Asking between fork and exec
was rejected: that runs Python in a copy of a process whose other threads may hold locks.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping
from errno import EACCES, ENOENT
from pathlib import Path

_PROBE_SECONDS = 5.0


def found_program(name: str, cwd: str | None, variables: Mapping[str, str]) -> str:
    """Return the path of a program, or raise the error that starting it would raise."""
    if cwd is not None and not Path(cwd).is_dir():
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), cwd)
    if "/" in name:
        path = str(Path(cwd or "").joinpath(name).absolute())
        return _checked(shutil.which(path), path)
    search = variables.get("PATH", os.defpath)
    return _checked(shutil.which(name, path=search), shutil.which(name, os.F_OK, search))


async def death_signal_prefix() -> tuple[str, ...]:
    """Return what stands before a command so that it ends with this process; maybe nothing."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return ()
    prefix = (setpriv, "--pdeathsig", "KILL", "--")
    works = await asyncio.to_thread(_works, (*prefix, setpriv, "--version"))
    return prefix if works else ()


def _checked(found: str | None, path: str | None) -> str:
    if found is not None:
        return found
    if path is None or not Path(path).exists():
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), path)
    raise PermissionError(EACCES, os.strerror(EACCES), path)


def _works(command: tuple[str, ...]) -> bool:
    try:
        done = subprocess.run(  # noqa: S603  nothing in it comes from outside
            command, capture_output=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
