"""`GET /metrics`: the figures of this node in the text format of Prometheus."""

from __future__ import annotations

from headgate.metrics.service import CONTENT_TYPE
from headgate.web.api import Api, Route
from headgate.web.http.answers import Answer
from headgate.web.http.requests import Request
from headgate.web.refusals import Refusal, not_found

OK = 200


async def show_metrics(api: Api, request: Request, _: str) -> Answer:
    """Answer with all metrics; they name every agent, so a bound token does not read them."""
    if request.caller.is_bound:
        raise Refusal("forbidden", "metrics name every agent; use a token that is not bound")
    if api.metrics is None:
        raise not_found()
    return Answer(OK, await api.metrics.text(), (), CONTENT_TYPE)


ROUTES = (
    Route(
        "GET",
        "/metrics",
        show_metrics,
        "show the metrics of this node to Prometheus",
        "read",
        answers={OK: "text/plain"},
    ),
)
