"""Logging in with a token, logging out, and choosing a theme: pages that anybody may open.

Rule: what is wrong with a token is told a few times a minute to one address. That may be a proxy of
many people, so a right token is let in whatever others tried. It is kept only in a cookie that no
script can read.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import quote

from headgate.api.http.response import Response
from headgate.dashboard.page import Form, Page, View, redirect
from headgate.dashboard.session import (
    THEME,
    THEMES,
    TOKEN,
    YEAR_SECONDS,
    Cookies,
    local_path,
    needs_login,
    token_problem,
)

LOGIN = "/ui/login"
MAX_TRIES = 10
TRIES_SECONDS = 60.0
MAX_PEERS = 1_024
UNAUTHORIZED = 401
TOO_MANY = 429

_TOO_MANY_TRIES = (
    "Too many wrong tokens came from your address, which others may share. In a minute Headgate"
    " says again what is wrong with yours. A valid token works at once."
)


class Tries:
    """How many wrong tokens each address has sent lately."""

    def __init__(self, ticks: Callable[[], float] = time.monotonic) -> None:
        self._ticks = ticks
        self._wrong: OrderedDict[str, list[float]] = OrderedDict()

    def are_used_up(self, peer: str) -> bool:
        """Tell whether an address has to wait."""
        return len(self._recent(peer)) >= MAX_TRIES

    def note(self, peer: str) -> None:
        """Count a wrong token."""
        self._wrong[peer] = [*self._recent(peer), self._ticks()]
        self._wrong.move_to_end(peer)
        if len(self._wrong) > MAX_PEERS:
            self._wrong.popitem(last=False)

    def _recent(self, peer: str) -> list[float]:
        since = self._ticks() - TRIES_SECONDS
        return [at for at in self._wrong.get(peer, ()) if at > since]


def login_path(url: str) -> str:
    """Return the address of the login that leads back to a page."""
    return LOGIN if url == "/" else f"{LOGIN}?next={quote(url, safe='/')}"


async def show_login(view: View, _: str) -> Page | Response:
    """Show the form; whoever needs none, or has logged in, goes on at once."""
    to = local_path(view.request.query().get("next", "/"))
    if not needs_login(view.api):
        return redirect(to)
    kept = Cookies(view.request).get(TOKEN)
    if kept and not await token_problem(view.api, view.request, kept):
        return redirect(to)
    if not kept and view.request.header(b"sec-fetch-site") == b"cross-site":
        # A browser does not send the cookie along a link of another site. From a page of our own
        # it does, so this one goes to itself once.
        return Page(template="bounce.html", title="One moment", context={"to": login_path(to)})
    return login_page(to)


def login_page(to: str, problem: str = "", status: int = 200) -> Page:
    """Return the form, with what was wrong with the last try."""
    context = {"to": to, "problem": problem}
    return Page(template="login.html", title="Log in", context=context, status=status)


async def log_in(view: View, form: Form, tries: Tries) -> Page | Response:
    """Keep a token that lets its owner in, or say what is wrong with it."""
    to, token, peer = local_path(form.get("next", "/")), form.get("token"), view.request.peer
    problem = await token_problem(view.api, view.request, token)
    if problem and tries.are_used_up(peer):
        return login_page(to, _TOO_MANY_TRIES, TOO_MANY)
    if problem:
        tries.note(peer)
        return login_page(to, f"{problem[:1].upper()}{problem[1:]}.", UNAUTHORIZED)
    return redirect(to, (Cookies(view.request).keep(TOKEN, token),))


async def log_out(view: View) -> Response:
    """Have the browser forget its token."""
    to = LOGIN if needs_login(view.api) else "/"
    return redirect(to, (Cookies(view.request).drop(TOKEN),))


async def choose_theme(view: View, form: Form) -> Response:
    """Keep a theme, or leave it to the system again."""
    to, theme, cookies = local_path(form.get("next", "/")), form.get("theme"), Cookies(view.request)
    if theme not in THEMES:
        return redirect(to, (cookies.drop(THEME),))
    kept = cookies.keep(THEME, theme, is_hidden=False, max_age_seconds=YEAR_SECONDS)
    return redirect(to, (kept,))
