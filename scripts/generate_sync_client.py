"""Writes `SyncClient` from `Client`, token by token: `make sync-client`.

With `--check` it writes nothing, and fails if the file is not what it would write.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tokenize
from itertools import pairwise
from pathlib import Path

CLIENT = Path(__file__).parent.parent / "src/headgate/client"
SOURCE = CLIENT / "client.py"
TARGET = CLIENT / "sync_client.py"

HEADER = """\
# Generated from client.py by scripts/generate_sync_client.py. Do not edit: change client.py, then
# run `make sync-client`.

"""

DROPPED = {"async", "await"}
NAMES = {
    "AsyncIterator": "Iterator",
    "AsyncTransport": "SyncTransport",
    "Client": "SyncClient",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "aclosing": "closing",
    "async_transport": "sync_transport",
    "asyncio": "time",
}
LINES = {"import asyncio\n": ""}
TEXTS = {
    "`Client`: a service's verbs for programs with asyncio.": (
        "`SyncClient`: a service's verbs for programs without asyncio, and for the command line."
    ),
    "\n\n`SyncClient` is generated from this file: `make sync-client`.\n": "",
    "It belongs to one event loop.": "Any thread may use it.",
}


def without_async(source: str) -> str:
    """Return a module without `async` and `await`, and with the names that are used instead."""
    for old, new in LINES.items():
        source = source.replace(old, new)
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    # From the end, so that a change does not move what is changed after it.
    for token, following in reversed(list(pairwise(tokens))):
        if token.type != tokenize.NAME:
            continue
        row, start = token.start
        line = lines[row - 1]
        if token.string in DROPPED:
            lines[row - 1] = line[:start] + line[following.start[1] :]
        elif token.string in NAMES:
            lines[row - 1] = line[:start] + NAMES[token.string] + line[token.end[1] :]
    text = "".join(lines)
    for old, new in TEXTS.items():
        if old not in text:
            message = f"client.py does not say {old!r} any more"
            raise ValueError(message)
        text = text.replace(old, new)
    return HEADER + text


def tidied(source: str) -> str:
    """Return a module with its imports in order, in the format of all others."""
    for command in (["check", "--select", "I", "--fix-only", "--quiet"], ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET), "-"]
        source = subprocess.run(  # noqa: S603 - nothing of it comes from outside
            ruff, input=source, capture_output=True, text=True, check=True
        ).stdout
    return source


def main() -> int:
    """Write the file, or with `--check` tell whether it is as it should be."""
    generated = tidied(without_async(SOURCE.read_text()))
    if "--check" not in sys.argv:
        TARGET.write_text(generated)
        return 0
    if TARGET.read_text() != generated:
        sys.stderr.write("sync_client.py is not what client.py gives; run make sync-client\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
