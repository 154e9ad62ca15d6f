"""The token of this machine: a file in the data directory that only its owner can read.

The first start on a store makes a token with all permissions, prints it once and writes it here,
where commands on the same machine find it. Rule: nobody else can read the file at any moment, and a
start never makes a second token: one that can be had by starting again would be no secret.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path

from headgate.cli.places.connection import TOKEN_FILE, read_private_file
from headgate.errors import InvalidSettingError
from headgate.tokens import FIRST_NAME, PERMISSIONS, Tokens, new_token, read_token

PREVIOUS = f"{TOKEN_FILE}.previous"
_ONLY_THE_OWNER = 0o600
_ONLY_THE_OWNER_ENTERS = 0o700
_MAKE_ONE = "headgate token create makes one; without any, headgate token create --offline does"


async def token_lines(tokens: Tokens, directory: Path, *, is_needed: bool) -> list[str]:
    """Make the first token of a store, or look whether the file has a good one; say so in lines."""
    path = directory / TOKEN_FILE
    first = [] if await tokens.list() else await _first_lines(tokens, directory)
    if first:
        return first
    why = await _problem_with(path, tokens)
    if why is None or (why == "" and not is_needed):
        return []
    return [f"{path} {why or 'does not exist'}; {_MAKE_ONE}"]


async def _first_lines(tokens: Tokens, directory: Path) -> list[str]:
    """Make the first token; nothing if another node has done so meanwhile."""
    new = new_token(name=FIRST_NAME, permissions=PERMISSIONS, now=tokens.now())
    path = directory / TOKEN_FILE
    had_one = path.exists()
    # The file comes first: a crash in between must not leave a token that nobody has.
    problem = write_token(directory, new.text)
    if not await tokens.found(new.kept):
        _put_back(directory, had_one=had_one)
        return []
    place = f"it is in {path}" if problem is None else f"{path} could not be written: {problem}"
    return [f"token {new.text}", f"this is shown once; {place}"]


def _put_back(directory: Path, *, had_one: bool) -> None:
    path = directory / TOKEN_FILE
    with suppress(OSError):
        if had_one:
            (directory / PREVIOUS).replace(path)
        else:
            path.unlink()


def token_header(directory: Path) -> str:
    """Return what a line with curl says to send the token of this machine."""
    return f' -H "Authorization: Bearer $(cat {shlex.quote(str(directory / TOKEN_FILE))})"'


def write_token(directory: Path, text: str) -> str | None:
    """Write the file in one step, and return what went wrong, if anything did.

    One that was there, of another store perhaps, is kept beside it. At no moment is there none, and
    what was written outlives a power cut.
    """
    path, fresh = directory / TOKEN_FILE, directory / f"{TOKEN_FILE}.{os.getpid()}"
    try:
        directory.mkdir(mode=_ONLY_THE_OWNER_ENTERS, parents=True, exist_ok=True)
        _write_private(fresh, text)
        _keep_previous(path, directory / PREVIOUS)
        fresh.replace(path)
        _sync(directory)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _keep_previous(path: Path, previous: Path) -> None:
    link = previous.with_name(f"{previous.name}.{os.getpid()}")
    link.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        os.link(path, link)
        link.replace(previous)
    # To rename one name of a file to another of the same file changes nothing.
    link.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _ONLY_THE_OWNER)
    try:
        os.write(descriptor, f"{text}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def _problem_with(path: Path, tokens: Tokens) -> str | None:
    """Return what is wrong with a file; nothing if it is not there, None if its token is good."""
    try:
        content = read_private_file(path)
    except InvalidSettingError as error:
        return f"is not used: {error.problem}"
    if content is None:
        return ""
    read = read_token(content.decode("ascii", "replace").strip())
    kept = None if read is None else await tokens.get(read[0])
    if read is None or kept is None or not kept.is_opened_by(read[1]):
        return "has no token of this store"
    return None if kept.token.is_good(tokens.now()) else "has a token that is over"
