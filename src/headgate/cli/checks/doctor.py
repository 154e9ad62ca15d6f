"""The checks of `headgate doctor`, each a function that looks and changes nothing.

Rule: a check never raises. What it cannot find out it says, with what a person can do about it.
"""

from __future__ import annotations

import http.client
import os
import shutil
import stat
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from headgate.cli.checks.findings import Finding, fail, ok, warn
from headgate.cli.checks.slots import slot_findings
from headgate.cli.checks.stores import books_findings, store_findings
from headgate.cli.checks.targets import target_findings
from headgate.cli.places.connection import TOKEN_FILE
from headgate.cli.places.data_directory import data_directory
from headgate.cli.places.store import settings_of
from headgate.data_lock import Holder, holder_of, is_held
from headgate.errors import HeadgateError, InvalidSettingError
from headgate.settings import Settings, settings_file, warnings_of
from headgate.wiring import held_folder

LEAST_FREE_BYTES = 100 * 2**20
FEW_FREE_BYTES = 2**30
ANSWER_SECONDS = 3.0
MOST_BYTES = 1_000
LIVE = b'{"status":"ok"'

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def examine(path: Path | None, data: Path | None, store_url: str | None) -> list[Finding]:
    """Make all checks; without settings that can be used, only those that need none."""
    try:
        settings = settings_of(path, store_url)
        directory = (data or data_directory()).absolute()
    except HeadgateError as error:
        advice = "correct it; headgate config check says the same"
        return [fail("settings", str(error), advice)]
    folder = held_folder(settings, directory)
    holder = holder_of(folder) if folder is not None and is_held(folder) else None
    return [
        *_settings(settings, path),
        *_directory(folder, holder),
        *store_findings(settings, directory),
        *books_findings(settings),
        *target_findings(settings, os.environ),
        *slot_findings(settings, os.environ),
        *_token(directory),
        _port(settings) if holder is None else _answers(holder.address),
    ]


def _settings(settings: Settings, given: Path | None) -> Iterator[Finding]:
    found = settings_file(given)
    yield ok("settings", "all defaults; no headgate.toml here" if found is None else str(found))
    for line in warnings_of(settings):
        key, _, problem = line.partition(": ")
        yield warn("settings", key, problem)


def _directory(folder: Path | None, holder: Holder | None) -> Iterator[Finding]:
    if folder is None:
        yield ok("directory", "the store is not in a directory of this machine")
        return
    if not folder.is_dir():
        yield ok("directory", f"{folder} is made at the first start")
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        advice = f"run as its owner, or chown it to {os.geteuid()}"
        yield fail("directory", f"{folder} cannot be written by this user", advice)
        return
    if folder.stat().st_mode & _OTHERS:
        advice = f"run chmod 700 {folder}"
        yield warn("directory", f"others may look into {folder}", advice)
    else:
        yield ok("directory", str(folder))
    yield ok("process", f"process {holder.pid} uses it" if holder else "no service uses it now")
    yield _disk(folder)


def _disk(folder: Path) -> Finding:
    free_bytes = shutil.disk_usage(folder).free
    found = f"{free_bytes / 2**30:.1f} GiB free"
    if free_bytes < LEAST_FREE_BYTES:
        return fail("disk", found, "free some space; nothing is taken while the disk is full")
    if free_bytes < FEW_FREE_BYTES:
        return warn("disk", found, "free some space soon")
    return ok("disk", found)


def _token(directory: Path) -> Iterator[Finding]:
    path = directory / TOKEN_FILE
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        yield ok("token", f"{path} is written at the first start")
        return
    except OSError as error:
        yield fail("token", f"{path}: {error.strerror}", "run as the user of the service")
        return
    if mode & _OTHERS:
        advice = f"make a new token with headgate token create, and run chmod 600 {path}"
        yield fail("token", f"others may read {path}", advice)
    else:
        yield ok("token", str(path))


def _port(settings: Settings) -> Finding:
    from headgate.web.http.server import listen  # noqa: PLC0415

    host, port = settings.server.host, settings.server.port
    if port == 0:
        return ok("port", "any that is free")
    try:
        listen(host, port).close()
    except InvalidSettingError as error:
        shown = f"[{host}]" if ":" in host else host
        answer = _answers(f"http://{shown}:{port}")
        if answer.verdict == "ok":
            return warn("port", answer.found, "it is another service's; choose one with --port")
        return fail("port", error.problem, "stop what uses it, or choose another with --port")
    return ok("port", f"{host} port {port} is free")


def _answers(address: str) -> Finding:
    """Ask whoever serves at an address whether it is a service, and for its clock."""
    place = urlsplit(address)
    if not place.port:
        return ok("port", "the service has chosen a free one")
    host = "127.0.0.1" if place.hostname in (None, "0.0.0.0") else place.hostname  # noqa: S104
    connection = http.client.HTTPConnection(host, place.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/livez", headers={"Host": place.netloc})
        response = connection.getresponse()
        at = parsedate_to_datetime(response.headers["date"]).timestamp()
        body = response.read(MOST_BYTES)
    except (OSError, http.client.HTTPException, TypeError, ValueError) as error:
        return fail("port", f"{address} does not answer: {error}", "see the log of the service")
    finally:
        connection.close()
    if not body.startswith(LIVE):
        return fail("port", f"{address} is another program's", "choose another with --port")
    return ok("port", f"a service answers at {address}, its clock {at - time.time():+.0f} s apart")
