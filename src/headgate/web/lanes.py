"""`GET /scheduler/lanes`: where tasks wait, for how long, and how loaded each lane is.

Counts are the store's; load and wait are known to the node that dispatches, and left open at any
other. Rule: however many lanes there are, the answer is bounded.
"""

from __future__ import annotations

from headgate.core.lane_figures import LaneFigure
from headgate.figure_bodies import LaneBody, LaneListBody
from headgate.store import LaneCount
from headgate.web.answers import Answer, json_answer
from headgate.web.api import Api, Route
from headgate.web.callers import Caller
from headgate.web.requests import Request
from headgate.web.status import own_totals

OK = 200
MAX_LANES = 1_000


async def show_lanes(api: Api, request: Request, _: str) -> Answer:
    """Answer with the lanes that have work."""
    return json_answer(OK, await lane_list(api, request.caller))


async def lane_list(api: Api, caller: Caller) -> LaneListBody:
    """Return the lanes that have work and belong to the caller, the longest wait first."""
    totals = own_totals(await api.engine.totals(), caller)
    found = None if api.outlook is None else api.outlook.lanes(api.engine.now())
    known = {(one.project_id, one.agent_id): one for one in found or ()}
    lanes = [
        _body(lane, known.get((lane.project_id, lane.agent_id)), is_known=found is not None)
        for lane in totals.lanes
        if lane.queued or lane.inflight
    ]
    lanes.sort(key=_order)
    return LaneListBody(lanes=lanes[:MAX_LANES], count=len(lanes), strategy=api.limits.strategy)


def _order(lane: LaneBody) -> tuple[float, int, int, str, str]:
    wait = lane.oldest_wait_seconds or 0.0
    return -wait, -lane.queued, -lane.inflight, lane.project_id, lane.agent_id


def _body(lane: LaneCount, figure: LaneFigure | None, *, is_known: bool) -> LaneBody:
    # A lane that is known to have no figure has only tasks that wait for a time or a parent.
    ready = 0 if is_known else None
    wait = None if figure is None else figure.longest_wait_seconds
    return LaneBody(
        project_id=lane.project_id,
        agent_id=lane.agent_id,
        queued=lane.queued,
        inflight=lane.inflight,
        ready=ready if figure is None else figure.ready,
        oldest_wait_seconds=None if wait is None else round(wait, 3),
        load=None if figure is None or figure.load is None else round(figure.load, 6),
    )


ROUTES = (
    Route(
        "GET",
        "/scheduler/lanes",
        show_lanes,
        "show where tasks wait",
        "read",
        answers={200: LaneListBody},
    ),
)
