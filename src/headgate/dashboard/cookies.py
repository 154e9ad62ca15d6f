"""The cookies of the dashboard: reading what a browser sends, writing what it is to keep.

Rule: what an action said is kept for the page that it leads to, by the address of that page, and
shown there once. A cookie's own path would not do: every page below it would get the message too.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from urllib.parse import quote, unquote

from headgate.web.http.requests import Request

TOKEN = "headgate_token"  # noqa: S105 - the name of a cookie
CSRF = "headgate_csrf"
SAID = "headgate_said_"
"""How the names of messages begin; the address of their page makes the rest."""
THEME = "headgate_theme"
MAX_SAID_BYTES = 1_000
"""Three times as much when it is written as a cookie, of which a browser keeps 4,096 bytes."""
YEAR_SECONDS = 365 * 86_400
SAID_SECONDS = 60
THEMES = ("light", "dark")

_ERROR_MARK = "!"
_SECRET = re.compile(r"[0-9a-f]{32}")

Header = tuple[bytes, bytes]


def cookies_of(request: Request) -> dict[str, str]:
    """Return what the browser has kept; of a name that comes twice, the first."""
    kept: dict[str, str] = {}
    for header in request.headers(b"cookie"):
        for pair in header.decode("latin-1").split(";"):
            name, _, value = pair.strip().partition("=")
            kept.setdefault(name, value)
    return kept


def csrf_of(cookies: dict[str, str]) -> str:
    """Return the secret that forms are sent with; empty if the browser has none yet."""
    value = cookies.get(CSRF, "")
    return value if _SECRET.fullmatch(value) else ""


def theme_of(cookies: dict[str, str]) -> str:
    """Return the theme that was chosen; empty leaves it to the system."""
    value = cookies.get(THEME, "")
    return value if value in THEMES else ""


def said_name(address: str) -> str:
    """Return the name under which a message waits for the page at an address with its query."""
    # A browser writes some characters of an address in another way than we do.
    page = unquote(address.partition("#")[0]).encode("utf-8", "replace")
    return f"{SAID}{blake2b(page, digest_size=8).hexdigest()}"


def said_of(cookies: dict[str, str], *, at: str) -> tuple[str, bool]:
    """Return what an action said for the page at an address, and whether it went wrong."""
    text = unquote(cookies.get(said_name(at), ""))[: MAX_SAID_BYTES + 1]
    return text.removeprefix(_ERROR_MARK), text.startswith(_ERROR_MARK)


def said(text: str, *, at: str, is_error: bool, is_secure: bool) -> Header:
    """Return the header that keeps what an action says until the page at an address shows it."""
    kept = text.encode("utf-8", "replace")[:MAX_SAID_BYTES].decode(errors="ignore")
    value = quote((_ERROR_MARK if is_error else "") + kept, safe="")
    return cookie(said_name(at), value, is_secure=is_secure, max_age_seconds=SAID_SECONDS)


def cookie(
    name: str,
    value: str,
    *,
    is_secure: bool = False,
    is_hidden: bool = True,
    max_age_seconds: int | None = None,
) -> Header:
    """Return the header that has a browser keep a value; without an age, until it is closed."""
    parts = [f"{name}={value}", "Path=/", "SameSite=Strict"]
    if is_hidden:
        parts.append("HttpOnly")
    if is_secure:
        parts.append("Secure")
    if max_age_seconds is not None:
        parts.append(f"Max-Age={max_age_seconds}")
    return (b"set-cookie", "; ".join(parts).encode("ascii"))


def dropped(name: str) -> Header:
    """Return the header that has a browser forget a value."""
    return cookie(name, "", max_age_seconds=0)
