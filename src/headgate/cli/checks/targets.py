"""Whether targets could be used: reachable, there to be run, importable; nothing is sent or run."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from headgate.cli.checks.findings import Finding, fail, ok, warn
from headgate.errors import HeadgateError
from headgate.executors.build import build_executor
from headgate.executors.targets import CallableTarget, CommandTarget, HttpTarget, Target
from headgate.settings import Settings
from headgate.settings.shown import variables_of

CONNECT_SECONDS = 3.0
_PORTS = {"http": 80, "https": 443}


def target_findings(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Look at every target."""
    for name, target in settings.targets.items():
        yield _examined(f"target {name}", name, target, environ)


def _examined(check: str, name: str, target: Target, environ: Mapping[str, str]) -> Finding:
    missing = sorted(variables_of(target) - set(environ))
    if missing:
        advice = "set it where the service starts; it may be set there and not here"
        return fail(check, f"{', '.join(missing)} is not set", advice)
    try:
        match target:
            case HttpTarget():
                build_executor(name, target, environ=environ, clock=time.time)
                return _reached(check, target)
            case CommandTarget():
                build_executor(name, target, environ=environ, clock=time.time)
                return _found(check, target)
            case CallableTarget():
                executor = build_executor(name, target, environ=environ, clock=time.time)
                asyncio.run(executor.open())
                return ok(check, f"{target.entry_point} can be imported")
            case _:
                return ok(check, "its tasks are pulled by workers")
    except (HeadgateError, ModuleNotFoundError) as error:
        return fail(check, str(error), "correct the target in the settings")


def _reached(check: str, target: HttpTarget) -> Finding:
    url = target.url if target.resolver is None else target.resolver.url
    try:
        place = urlsplit(url)
        host, port = place.hostname or "", place.port or _PORTS.get(place.scheme, 80)
    except ValueError:
        host, port = "", 0
    if not host or "{" in host:
        return ok(check, "its address is known when a task runs")
    if target.proxy is not None:
        return ok(check, "goes through a proxy")
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        advice = "start it, or correct the address; tasks fail until it answers"
        return warn(check, f"{host} port {port} does not answer: {error}", advice)
    return ok(check, f"{host} port {port} answers")


def _found(check: str, target: CommandTarget) -> Finding:
    program = target.command[0]
    if target.cwd is not None and not Path(target.cwd).is_dir():
        return fail(check, f"{target.cwd} is not a folder", "make it, or correct cwd")
    if "{" in program:
        return ok(check, "its program is known when a task runs")
    path = target.env.get("PATH", os.environ.get("PATH"))
    if shutil.which(program, path=path) is None:
        return fail(check, f"{program} cannot be run", "install it, or write its whole path")
    return ok(check, f"{program} can be run")
