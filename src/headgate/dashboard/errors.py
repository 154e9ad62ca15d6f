"""Refusals as pages: what happened, what to do, and the id under which the log has it.

Rule: a page names the part that is away. Of budgets that may be a ledger outside the store. What
is tried again by itself is a look; an action that failed is left to whoever asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from headgate.api.errors import ApiError
from headgate.api.http.request import Request
from headgate.api.http.response import ORIGIN_ADVICE
from headgate.dashboard.formats import capital
from headgate.dashboard.lists import BUDGETS
from headgate.dashboard.page import Page
from headgate.dashboard.session import local_path
from headgate.engine.supervisor import OK

OVERVIEW = "/"
SERVER_FAULT = 500
UNAVAILABLE = 503

_ADVICE = {
    400: "Check the address or what you entered, then try again.",
    403: "Log in with a token that may do this, or ask whoever runs the service for one.",
    404: "It may have been deleted since, or the address is mistyped. The lists show what is here.",
    405: "This address is for a form. Go back to the page that has it.",
    409: "Load the page again to see how things stand now.",
    410: "What a deleted task used is still in the usage and the budgets.",
    429: "Wait a moment, then try again.",
    500: "This is a fault in the service. Its log has the details under the id below; please report"
    " it.",
    503: "The service retries by itself, and this page comes back when it can;"
    " run headgate doctor for details.",
}
_ACTION_ADVICE = {503: "Run headgate doctor for the cause."}
_NOT_CONFIRMED = (
    "Headgate cannot confirm that anything was done. Check the present state, then send the form"
    " again."
)
_LATER = "; try again later"
_DEFAULT_ADVICE = "Go back and try again."
_CSRF_ADVICE = "Load the page that has the form again, allow cookies for this host, and send it."
_LEDGER_AWAY = "The budget ledger is unavailable now"
_LEDGER_ADVICE = (
    "Until it answers, no money is granted. The service asks it again by itself; see that the"
    " server under ledger.url in the settings runs, and that this node reaches it. The log has what"
    " is in the way, and run headgate doctor for details."
)


def is_of_ledger(api_error: ApiError, path: str, parts: Mapping[str, str]) -> bool:
    """Tell whether a page failed because of a ledger outside the store, by how the parts are."""
    is_away = api_error.body.code == "unavailable" and parts.get("ledger", OK) != OK
    return is_away and path.startswith(BUDGETS)


def page_of_form(request: Request) -> str | None:
    """Return the page that a form was sent from, the overview where nobody knows; None without."""
    if request.method != "POST":
        return None
    try:
        page = urlsplit(request.header(b"referer").decode("latin-1"))
    except ValueError:
        return OVERVIEW
    return local_path(page._replace(scheme="", netloc="", fragment="").geturl())


def error_page(
    api_error: ApiError,
    request_id: str,
    *,
    names_ledger: bool = False,
    sent_from: str | None = None,
) -> Page:
    """Return the page of a refusal; `sent_from` is the page whose form was refused, if any."""
    body, status = api_error.body, api_error.kind.status
    title, problem = capital(body.title), capital(body.error)
    advice = _advice(api_error)
    if names_ledger:
        title, problem, advice = _LEDGER_AWAY, _LEDGER_AWAY, _LEDGER_ADVICE
    is_unconfirmed = sent_from is not None and status >= SERVER_FAULT
    if is_unconfirmed:
        further = advice if names_ledger else _ACTION_ADVICE.get(status, advice)
        advice = f"{_NOT_CONFIRMED} {further}"
    is_asked_again = sent_from is None and status == UNAVAILABLE
    if is_asked_again:
        problem = problem.removesuffix(_LATER)
    context = {
        "problem": f"{problem}.",
        "advice": advice,
        "code": body.code,
        "request_id": request_id,
        "is_asked_again": is_asked_again,
        "sent_from": sent_from if is_unconfirmed and sent_from != OVERVIEW else "",
        "looked_from": sent_from,
    }
    return Page(template="error.html", title=title, context=context, status=status)


def _advice(api_error: ApiError) -> str:
    if api_error.body.details.get("field") == "csrf":
        return _CSRF_ADVICE
    if api_error.body.code == "forbidden_origin":
        return ORIGIN_ADVICE
    return _ADVICE.get(api_error.kind.status, _DEFAULT_ADVICE)
