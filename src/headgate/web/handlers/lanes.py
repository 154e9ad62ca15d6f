"""`GET /scheduler/lanes`: where tasks wait, for how long, and how loaded each lane is.

Counts are the store's; load and wait are known to the node that dispatches, and left open at any
other. Rule: however many lanes there are, the answer is bounded, says how many there are, and is
narrowed before it is cut.
"""

from __future__ import annotations

import msgspec

from headgate.bodies.figures import LaneBody, LaneListBody
from headgate.core.dispatch.lane_figures import LaneFigure
from headgate.core.texts.name_search import named_like
from headgate.intake.bodies import check_unknown
from headgate.store import LaneCount, Totals
from headgate.web.api import Api, Route
from headgate.web.callers import Caller, own
from headgate.web.handlers.status import own_totals
from headgate.web.http.answers import Answer, json_answer
from headgate.web.http.requests import Request

OK = 200
MAX_LANES = 1_000
LANES_QUERY = ("projectId", "find")


class LaneQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which lanes are listed: those of a project, those with a text in their names, from which on.

    None is any project, and an empty text is in every name.
    """

    project_id: str | None = None
    find: str = ""
    first: int = 0
    most: int | None = None


async def show_lanes(api: Api, request: Request, _: str) -> Answer:
    """Answer with the lanes that have work."""
    given = request.query()
    check_unknown(given, LANES_QUERY)
    query = LaneQuery(
        project_id=own("projectId", given.get("projectId") or None, request.caller.project_id),
        find=given.get("find", ""),
        most=MAX_LANES,
    )
    return json_answer(OK, lane_list(api, await api.engine.totals(), request.caller, query))


def lane_list(api: Api, totals: Totals, caller: Caller, query: LaneQuery) -> LaneListBody:
    """Return the lanes that have work and belong to the caller, the longest wait first."""
    found = None if api.outlook is None else api.outlook.lanes(api.engine.now())
    known = {(one.project_id, one.agent_id): one for one in found or ()}
    lanes = [
        (lane, known.get((lane.project_id, lane.agent_id)))
        for lane in named_like(own_totals(totals, caller).lanes, query.find, _names)
        if (lane.queued or lane.inflight) and query.project_id in (None, lane.project_id)
    ]
    lanes.sort(key=_order)
    end = None if query.most is None else query.first + query.most
    return LaneListBody(
        # Only what is shown is made a body of: there may be thousands.
        lanes=[_body(*one, is_known=found is not None) for one in lanes[query.first : end]],
        count=len(lanes),
        strategy=api.limits.strategy,
    )


def _names(lane: LaneCount) -> tuple[str, str]:
    return lane.project_id, lane.agent_id


def _order(known: tuple[LaneCount, LaneFigure | None]) -> tuple[float, int, int, str, str]:
    lane, figure = known
    wait = None if figure is None else figure.longest_wait_seconds
    return -(wait or 0.0), -lane.queued, -lane.inflight, lane.project_id, lane.agent_id


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
        query=LANES_QUERY,
        refuses=("unknown_field",),
    ),
)
