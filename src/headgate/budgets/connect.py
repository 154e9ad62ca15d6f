"""One door to every budget: the URL says what keeps the ledger.

A backend's module, and the package that it needs, is loaded only when its URL is asked for. Rule: a
URL may carry a password, so no error repeats more of it than its scheme.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from headgate.errors import InvalidSettingError
from headgate.extras import naming_extras
from headgate.redaction import hidden_address

if TYPE_CHECKING:
    from headgate.budgets.tracker import LedgerTracker

KNOWN_URLS = (
    "memory:",
    "sqlite:///budget.db",
    "sqlite:////var/lib/headgate/budget.db",
    "redis://127.0.0.1:6379/0",
    "rediss://host:6379/0",
    "unix:///run/redis.sock",
    "redis+sentinel://host:26379,host2:26379/service/0",
    "redis+cluster://host:6379,host2:6379",
    "postgresql://host/database",
)
"""One URL of each form."""

_BACKENDS = {
    "sqlite": ("headgate.budgets.sqlite", "SqliteBudgetTracker"),
    "redis": ("headgate.budgets.redis", "RedisBudgetTracker"),
    "postgres": ("headgate.budgets.postgres", "PostgresBudgetTracker"),
}


def connect_budget(url: str = "memory:") -> LedgerTracker:
    """Return the tracker of a URL; use it as an async context manager, which connects.

    After `sqlite:///` comes a path, relative or absolute: `sqlite:////var/lib/budget.db` has four.
    """
    if not isinstance(url, str):
        problem = f"must be a string and not {type(url).__name__}"
        raise InvalidSettingError("url", f"{problem}; write one as {', '.join(KNOWN_URLS)}")
    scheme, colon, rest = url.partition(":")
    scheme = scheme.lower()
    if scheme == "memory":
        if not colon or rest:
            raise InvalidSettingError("url", "memory has no name or place; write memory:")
        return _load("headgate.budgets.local", "LocalBudgetTracker")()
    kind = next((kind for kind, schemes in SCHEMES.items() if scheme in schemes), "")
    backend = _BACKENDS.get(kind)
    if backend is None:
        problem = f"{scheme[:20]!r} is not a scheme that keeps budgets"
        raise InvalidSettingError("url", f"{problem}; write one as {', '.join(KNOWN_URLS)}")
    place = sqlite_path(url) if scheme == "sqlite" else f"{scheme}{colon}{rest}"
    return _load(*backend)(place)


def sqlite_path(url: str) -> Path:
    """Return the path that a sqlite URL names."""
    rest = url.partition(":")[2]
    path = rest.removeprefix("///")
    if not path or path == rest:
        problem = "a path follows sqlite:///, as in sqlite:///budget.db"
        raise InvalidSettingError("url", f"{problem} or sqlite:////var/lib/headgate/budget.db")
    if "?" in path:
        raise InvalidSettingError("url", "a sqlite URL has no options; leave out what follows ?")
    return Path(path).expanduser()


def _load(module: str, name: str) -> Callable[..., LedgerTracker]:
    with naming_extras("url"):
        return cast("Callable[..., LedgerTracker]", getattr(import_module(module), name))


# Which URLs belong to which kind of ledger, and the variable that names one; loads nothing.

URL_VARIABLE = "HEADGATE_BUDGET_URL"

SCHEMES = {
    "local": ("memory",),
    "sqlite": ("sqlite",),
    "redis": (
        *("redis", "rediss", "unix"),
        *("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
    ),
    "postgres": ("postgresql", "postgres"),
}
"""By the kind of a ledger, the schemes of its URLs."""

EXAMPLES = {"redis": "redis://127.0.0.1:6379/0", "postgres": "postgresql://host/database"}


def ledger_address(url: str) -> str:
    """Return what `--ledger` of a command takes for a URL, without its password; empty for none."""
    scheme = scheme_of(url)
    if scheme in SCHEMES["local"]:
        return ""
    return str(sqlite_path(url)) if scheme in SCHEMES["sqlite"] else hidden_address(url)


def scheme_of(url: str) -> str:
    """Return the scheme of a URL; of a text that is none, its beginning."""
    return url.partition(":")[0].lower()
