"""Packages that a bare install does not bring, and the extra that brings each.

Rule: whoever lacks one is told what to install, in one line, wherever it is missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headgate.errors import InvalidSettingError

EXTRAS = {
    "apsw": "server",
    "httpcore2": "server",
    "httptools": "server",
    "httpx2": "client",
    "jinja2": "server",
    "psycopg": "postgres",
    "redis": "redis",
    "ssrfguard": "server",
    "structlog": "server",
    "textual": "top",
    "yaml": "server",
}


@contextmanager
def naming_extras(asked_for: str) -> Iterator[None]:
    """Say which extra is to be installed, where a package of one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        problem = f"needs the package {package}, which is not installed"
        advice = f"run pip install 'headgate[{EXTRAS[package]}]'"
        raise InvalidSettingError(asked_for, f"{problem}; {advice}") from None
