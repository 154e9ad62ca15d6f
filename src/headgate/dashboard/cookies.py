"""The cookies of the dashboard: reading what a browser sends, writing what it is to keep."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from headgate.web.http.requests import Request

TOKEN = "headgate_token"  # noqa: S105 - the name of a cookie
CSRF = "headgate_csrf"
SAID = "headgate_said"
THEME = "headgate_theme"
MAX_SAID_LENGTH = 500
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


def said_of(cookies: dict[str, str]) -> tuple[str, bool]:
    """Return what the last action said, and whether it went wrong."""
    text = unquote(cookies.get(SAID, ""))[: MAX_SAID_LENGTH + 1]
    return text.removeprefix(_ERROR_MARK), text.startswith(_ERROR_MARK)


def said(text: str, *, is_error: bool) -> Header:
    """Return the header that keeps what an action says until the next page shows it."""
    mark = _ERROR_MARK if is_error else ""
    value = quote(mark + text[:MAX_SAID_LENGTH], safe="")
    return cookie(SAID, value, max_age_seconds=SAID_SECONDS)


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
