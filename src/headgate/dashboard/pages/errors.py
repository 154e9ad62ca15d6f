"""Refusals as pages: what happened, what to do, and the id under which the log has it."""

from __future__ import annotations

from headgate.dashboard.page import Page
from headgate.dashboard.shown.formats import capital
from headgate.web.refusals import Refusal

_ADVICE = {
    400: "Check the address or what you entered, then try again.",
    403: "Log in with a token that may do this, or ask whoever runs the service for one.",
    404: "It may have been deleted since, or the address is mistyped. The lists show what is here.",
    405: "This address is for a form. Go back to the page that has it.",
    409: "Load the page again to see how things stand now.",
    421: "Open the service under one of its own names; auth.allowed_hosts in its settings may add"
    " another.",
    429: "Wait a moment, then try again.",
    500: "This is a fault of the service. Its log has the details under the id below; please report"
    " it.",
    503: "The service tries again by itself. Wait a few seconds, then load the page again;"
    " headgate doctor says more.",
}
_DEFAULT_ADVICE = "Go back and try again."
_CSRF_ADVICE = "Load the page that has the form again, allow cookies for this host, and send it."


def error_page(refusal: Refusal, request_id: str) -> Page:
    """Return the page of a refusal."""
    body, status = refusal.body, refusal.kind.status
    advice = _ADVICE.get(status, _DEFAULT_ADVICE)
    if body.details.get("field") == "csrf":
        advice = _CSRF_ADVICE
    context = {
        "problem": f"{capital(body.error)}.",
        "advice": advice,
        "code": body.code,
        "request_id": request_id,
    }
    return Page(template="error.html", title=capital(body.title), context=context, status=status)
