"""Packages that `pip install headgate` does not bring, and the extra that brings each.

Rule: whoever lacks one is told what to install, in one line, wherever it is missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headgate.errors import MissingPackageError

EXTRAS = {"opentelemetry": "otel", "psycopg": "postgres", "ray": "ray", "redis": "redis"}


@contextmanager
def naming_extras(asked_for: str) -> Iterator[None]:
    """Say which extra is to be installed, where a package of one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        problem = missing_package(error)
        if problem is None:
            raise
        raise MissingPackageError(asked_for, problem) from None


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return which package is not installed and what to run; None if it is one of our modules."""
    package = (error.name or "").partition(".")[0]
    if package in {"", "headgate"}:
        return None
    extra = EXTRAS.get(package)
    wanted = "--force-reinstall headgate" if extra is None else f"'headgate[{extra}]'"
    return f"needs the package {package}, which is not installed; run pip install {wanted}"
