"""Refusals as pages: what happened, what to do, and the id under which the log has it.

Rule: a page names the part that is away. Of budgets that may be a ledger outside the store.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.dashboard.page import Page
from headgate.dashboard.shown.formats import capital
from headgate.dashboard.shown.reachable import BUDGETS
from headgate.runtime.health import OK
from headgate.web.http.plain_pages import ORIGIN_ADVICE
from headgate.web.refusals import Refusal

_ADVICE = {
    400: "Check the address or what you entered, then try again.",
    403: "Log in with a token that may do this, or ask whoever runs the service for one.",
    404: "It may have been deleted since, or the address is mistyped. The lists show what is here.",
    405: "This address is for a form. Go back to the page that has it.",
    409: "Load the page again to see how things stand now.",
    429: "Wait a moment, then try again.",
    500: "This is a fault of the service. Its log has the details under the id below; please report"
    " it.",
    503: "The service tries again by itself. Wait a few seconds, then load the page again;"
    " headgate doctor says more.",
}
_DEFAULT_ADVICE = "Go back and try again."
_CSRF_ADVICE = "Load the page that has the form again, allow cookies for this host, and send it."
_LEDGER_AWAY = "The budget ledger cannot be asked now"
_LEDGER_ADVICE = (
    "Until it answers, no money is granted. The service asks it again by itself; see that the"
    " server under ledger.url in the settings runs, and that this node reaches it. The log has what"
    " is in the way, and headgate doctor says more."
)


def is_of_ledger(refusal: Refusal, path: str, parts: Mapping[str, str]) -> bool:
    """Tell whether a page failed because of a ledger outside the store, by how the parts are."""
    is_away = refusal.body.code == "unavailable" and parts.get("ledger", OK) != OK
    return is_away and path.startswith(BUDGETS)


def error_page(refusal: Refusal, request_id: str, *, names_ledger: bool = False) -> Page:
    """Return the page of a refusal."""
    body, status = refusal.body, refusal.kind.status
    title, problem = capital(body.title), capital(body.error)
    advice = _ADVICE.get(status, _DEFAULT_ADVICE)
    if body.details.get("field") == "csrf":
        advice = _CSRF_ADVICE
    if body.code == "forbidden_origin":
        advice = ORIGIN_ADVICE
    if names_ledger:
        title, problem, advice = _LEDGER_AWAY, _LEDGER_AWAY, _LEDGER_ADVICE
    context = {
        "problem": f"{problem}.",
        "advice": advice,
        "code": body.code,
        "request_id": request_id,
    }
    return Page(template="error.html", title=title, context=context, status=status)
