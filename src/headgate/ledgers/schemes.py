"""Which URLs belong to which kind of ledger, and the variable that names one; loads nothing."""

from __future__ import annotations

URL_VARIABLE = "HEADGATE_BUDGET_URL"

SCHEMES = {
    "local": ("memory",),
    "sqlite": ("sqlite",),
    "redis": ("redis", "rediss", "unix"),
    "postgres": ("postgresql", "postgres"),
}
"""By the kind of a ledger, the schemes of its URLs."""

EXAMPLES = {"redis": "redis://127.0.0.1:6379/0", "postgres": "postgresql://host/database"}


def scheme_of(url: str) -> str:
    """Return the scheme of a URL; of a text that is none, its beginning."""
    return url.partition(":")[0].lower()
