"""The cookies of the dashboard: reading what a browser sends, writing what it is to keep.

Over HTTPS every name has a prefix with which browsers keep a cookie for this very host and for
HTTPS alone, and only such names are read there: whatever came without HTTPS, anybody on the way may
have set. Rule: what an action said is kept for the page that it leads to, by the address of that
page, and shown there once. A cookie's own path would not do: every page below it would get the
message too.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from urllib.parse import quote, unquote

from headgate.web.http.answers import Headers
from headgate.web.http.requests import Request

HOST_PREFIX = "__Host-"
TOKEN = "headgate_token"  # noqa: S105 - the name of a cookie
CSRF = "headgate_csrf"
SAID = "headgate_said_"
"""How the names of messages begin; the address of their page makes the rest."""
THEME = "headgate_theme"
MAX_SAID_BYTES = 1_000
"""Three times as much when it is written as a cookie, of which a browser keeps 4,096 bytes."""
MAX_WAITING = 8
"""How many messages wait for their pages; a browser with too many cookies forgets the login."""
YEAR_SECONDS = 365 * 86_400
SAID_SECONDS = 60
THEMES = ("light", "dark")

_ERROR_MARK = "!"
_SECRET = re.compile(r"[0-9a-f]{32}")
_SAID_NAME = re.compile(rf"{SAID}[0-9a-f]{{16}}")

Header = tuple[bytes, bytes]


class Cookies:
    """What the browser of a request has kept, and the headers that have it keep something else."""

    def __init__(self, request: Request) -> None:
        self._is_secure = request.is_secure
        self._kept = _kept(request, self.sent_name(""))

    def get(self, name: str) -> str:
        """Return what is kept under a name; empty if nothing is."""
        return self._kept.get(name, "")

    def sent_name(self, name: str) -> str:
        """Return the name as the browser has it."""
        return f"{HOST_PREFIX if self._is_secure else ''}{name}"

    @property
    def csrf(self) -> str:
        """The secret that forms are sent with; empty if the browser has none yet."""
        value = self.get(CSRF)
        return value if _SECRET.fullmatch(value) else ""

    @property
    def theme(self) -> str:
        """The theme that was chosen; empty leaves it to the system."""
        value = self.get(THEME)
        return value if value in THEMES else ""

    def keep(
        self, name: str, value: str, *, is_hidden: bool = True, max_age_seconds: int | None = None
    ) -> Header:
        """Return the header that has a browser keep a value; without an age, until it is closed."""
        parts = [f"{self.sent_name(name)}={value}", "Path=/", "SameSite=Strict"]
        if is_hidden:
            parts.append("HttpOnly")
        if self._is_secure:
            parts.append("Secure")
        if max_age_seconds is not None:
            parts.append(f"Max-Age={max_age_seconds}")
        return (b"set-cookie", "; ".join(parts).encode("ascii"))

    def drop(self, name: str) -> Header:
        """Return the header that has a browser forget a value."""
        return self.keep(name, "", max_age_seconds=0)

    def said(self, *, at: str) -> tuple[str, bool]:
        """Return what an action said for the page at an address, and whether it went wrong."""
        text = unquote(self.get(self._said_name(at)))[: MAX_SAID_BYTES + 1]
        return text.removeprefix(_ERROR_MARK), text.startswith(_ERROR_MARK)

    def say(self, text: str, *, at: str, is_error: bool) -> Headers:
        """Return what keeps a message until the page at an address shows it.

        Those that have waited longest give way; a browser sends them in the order of their age.
        """
        name = self._said_name(at)
        waiting = [one for one in self._kept if _SAID_NAME.fullmatch(one) and one != name]
        kept = text.encode("utf-8", "replace")[:MAX_SAID_BYTES].decode(errors="ignore")
        value = quote((_ERROR_MARK if is_error else "") + kept, safe="")
        own = self.keep(name, value, max_age_seconds=SAID_SECONDS)
        return (own, *[self.drop(one) for one in waiting[: 1 - MAX_WAITING]])

    def drop_said(self, *, at: str) -> Header:
        """Return the header that has a browser forget what was said for a page."""
        return self.drop(self._said_name(at))

    def _said_name(self, address: str) -> str:
        """Return the name under which a message waits for the page at an address with its query.

        Other services of the host can set cookies too. They cannot know the name of one that is
        made with what only this browser and the service know.
        """
        own = blake2b(f"{self.csrf} {self.get(TOKEN)}".encode()).digest()
        # A browser writes some characters of an address in another way than we do.
        page = unquote(address.partition("#")[0]).encode("utf-8", "replace")
        return f"{SAID}{blake2b(page, key=own, digest_size=8).hexdigest()}"


def _kept(request: Request, prefix: str) -> dict[str, str]:
    """Return the cookies whose names have a prefix, without it; of one that comes twice, the first.

    Browsers send no cookie with the prefix of HTTPS over anything else, so none is left out there.
    """
    kept: dict[str, str] = {}
    for header in request.headers(b"cookie"):
        for pair in header.decode("latin-1").split(";"):
            name, _, value = pair.strip().partition("=")
            if name.startswith(prefix):
                kept.setdefault(name.removeprefix(prefix), value)
    return kept
