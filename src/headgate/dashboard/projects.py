"""Projects and agents: who should get what, who got it, where tasks wait, and the switches.

Whoever may read sees projects and lanes as far as they are its own, and no agents, as over the API.
Rule: a change goes the way of the API's own, as an override beside the file; what it could not be
is said on the page that it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args
from urllib.parse import quote

from msgspec import UNSET

from headgate.api.admin import (
    agent_bodies,
    agent_body,
    counts_by,
    listed_agents,
    patch,
    project_bodies,
)
from headgate.api.api import actor_of
from headgate.api.errors import ApiError
from headgate.api.http.slices import in_slices
from headgate.api.schema.admin import (
    AgentBody,
    AgentPatchBody,
    LaneBody,
    LaneListBody,
    PatchBody,
    ProjectBody,
    ProjectPatchBody,
    ProjectStatusText,
    StandingText,
)
from headgate.api.status import LaneQuery, lane_list
from headgate.core.fair_share import shares
from headgate.core.text import Steps, named_like, percent
from headgate.dashboard.forms import (
    AGENT_FIELDS,
    PROJECT_FIELDS,
    changed_or_said,
    changes_nothing,
    float_of,
    integer_of,
    one_of,
    only_changed,
    rebased,
)
from headgate.dashboard.lists import (
    PROJECTS,
    ROWS,
    Part,
    first_of,
    looked_for,
    part_at,
    part_of,
    project_href,
    written_name,
)
from headgate.dashboard.page import Done, Form, Page, PageRoute, View, action_route, page_route
from headgate.storage.store import Totals

AGENTS = "/ui/agents"
AGENTS_FROM = "agents_from"
LANES_FROM = "lanes_from"
MAX_SHARES = 20


async def show(view: View, _: str) -> Page:
    """Show all projects, agents and lanes."""
    find = looked_for(view)
    # Read once: with thousands of lanes it is most of what the page costs.
    totals = await view.api.engine.totals()
    projects = project_bodies(view.api, totals, view.caller)
    lanes = await in_slices(_lanes(view, totals, find=find))
    context = {
        "find": find,
        "is_paused": view.api.is_paused,
        "projects": part_of(
            view, named_like(projects, find, lambda one: (one.id, one.name)), "projects_from"
        ),
        "agents": _agents(view, totals, find=find),
        "lanes": part_at(view, lanes.lanes, LANES_FROM, count=lanes.count),
        **_shared(view, projects),
        "strategy": lanes.strategy,
        "has_own_projects": len(projects) > 1,
        "labels": AGENT_FIELDS,
    }
    return Page(template="projects.html", title="Projects and agents", context=context)


async def show_project(view: View, name: str) -> Page:
    """Show one project, with what can be changed of it."""
    totals = await view.api.engine.totals()
    projects = project_bodies(view.api, totals, view.caller)
    project = _found(projects, name)
    lanes = await in_slices(_lanes(view, totals, project_id=name))
    path, compared = project_href(name), _compared(projects, project)
    context = {
        "project": project,
        "projects": compared,
        "more_projects": len(projects) - len(compared),
        "lanes": part_at(view, lanes.lanes, LANES_FROM, count=lanes.count, path=path),
        **_shared(view, projects),
        "strategy": lanes.strategy,
        "url": _with_query(view, path),
        "budget_scope": f"project:{name}",
        "held": project_fields(project),
        "labels": PROJECT_FIELDS,
    }
    return Page(template="project.html", title=f"Project {name}", context=context)


async def change_project(view: View, name: str, form: Form) -> Done:
    """Change a project beside the file, and say what that does to its share."""

    async def change() -> str:
        before = _found(await _projects(view), name)
        asked = rebased(form, project_fields(before))
        known = ProjectPatchBody(
            credit_weight=before.credit_weight,
            max_concurrent_agents=before.max_concurrent_agents,
            budget_limit=before.budget_limit,
            status=before.status,
        )
        given = ProjectPatchBody(
            credit_weight=float_of(asked, "credit_weight"),
            max_concurrent_agents=integer_of(asked, "max_concurrent_agents"),
            budget_limit=integer_of(asked, "budget_limit"),
            status=one_of(asked, "status", get_args(ProjectStatusText)),
        )
        wanted, target = only_changed(given, known), _target(view, name)
        if changes_nothing(wanted):
            return f"project {name} {_STAYS}"
        await patch(view.api, view.request, "projects", name, wanted)
        after = _found(await _projects(view), name)
        return _said_of_project(after, wanted, target, _target(view, name))

    return await changed_or_said(_back(form, project_href(name)), change, PROJECT_FIELDS)


async def reset_project(view: View, name: str, form: Form) -> Done:
    """Let the file say everything of a project again."""

    async def reset() -> str:
        fields = _found(await _projects(view), name).overridden
        await patch(view.api, view.request, "projects", name, ProjectPatchBody(reset=fields))
        return f"project {name} has the values of the file again"

    return await changed_or_said(_back(form, project_href(name)), reset)


async def change_agent(view: View, name: str, form: Form) -> Done:
    """Change an agent beside the file."""

    async def change() -> str:
        before = _agent(view, name)
        asked = rebased(form, agent_fields(before))
        known = AgentPatchBody(capacity=before.capacity, status=before.status)
        given = AgentPatchBody(
            capacity=integer_of(asked, "capacity"),
            status=one_of(asked, "status", get_args(StandingText)),
        )
        wanted = only_changed(given, known)
        if changes_nothing(wanted):
            return f"agent {name} {_STAYS}"
        await patch(view.api, view.request, "agents", name, wanted)
        return _said_of_agent(_agent(view, name), wanted)

    return await changed_or_said(_back(form, PROJECTS), change, AGENT_FIELDS)


async def reset_agent(view: View, name: str, form: Form) -> Done:
    """Let the file say everything of an agent again."""

    async def reset() -> str:
        agents = {one.id: one for one in await agent_bodies(view.api)}
        fields = agents[name].overridden if name in agents else []
        await patch(view.api, view.request, "agents", name, AgentPatchBody(reset=fields))
        return f"agent {name} has the values of the file again"

    return await changed_or_said(_back(form, PROJECTS), reset)


async def pause_all(view: View, _: str, form: Form) -> Done:
    """Start nothing new."""
    await view.api.config.pause(actor_of(view.request), is_paused=True)
    return Done(to=_back(form, PROJECTS), said="everything is paused; running tasks continue.")


async def resume_all(view: View, _: str, form: Form) -> Done:
    """Start tasks again."""
    await view.api.config.pause(actor_of(view.request), is_paused=False)
    return Done(to=_back(form, PROJECTS), said="tasks start again.")


def project_fields(project: ProjectBody) -> dict[str, str]:
    """Return what the form of a project is drawn with."""
    cap, limit = project.max_concurrent_agents, project.budget_limit
    return {
        "credit_weight": repr(float(project.credit_weight)).removesuffix(".0"),
        "max_concurrent_agents": "" if cap is None else str(cap),
        "budget_limit": "" if limit is None else str(limit),
    }


def agent_fields(agent: AgentBody) -> dict[str, str]:
    """Return what the form of an agent is drawn with."""
    return {"capacity": str(agent.capacity)}


def agent_href(name: str) -> str:
    """Return the address under which an agent is changed."""
    return f"{AGENTS}/{written_name(name)}"


def tasks_href(lane: LaneBody) -> str:
    """Return the address of the tasks that wait in a lane."""
    agent = f"&agent={quote(lane.agent_id, safe='')}" if lane.agent_id else ""
    return f"/ui/tasks?state=queued&project={quote(lane.project_id, safe='')}{agent}"


def _lanes(
    view: View, totals: Totals, *, find: str = "", project_id: str | None = None
) -> Steps[LaneListBody]:
    """Return the lanes that a page shows of those that it is about."""
    query = LaneQuery(project_id=project_id, find=find, first=first_of(view, LANES_FROM), most=ROWS)
    return lane_list(view.api, totals, view.caller, query)


def _agents(view: View, totals: Totals, *, find: str) -> Part[AgentBody]:
    """Return the agents that a page shows: found by name first, since there may be thousands."""
    if not view.may("admin"):
        return part_of(view, (), AGENTS_FROM)
    state = view.api.config.state
    counts = counts_by(totals.lanes, "agent_id")
    found = named_like(listed_agents(state, counts), find, lambda name: (name,))
    first = first_of(view, AGENTS_FROM)
    rows = [agent_body(state, name, counts) for name in found[first : first + ROWS]]
    return part_at(view, rows, AGENTS_FROM, count=len(found))


def _shared(view: View, projects: Sequence[ProjectBody]) -> dict[str, Any]:
    known = [one for one in projects if one.target_share is not None]
    most = max((max(one.target_share or 0.0, one.actual_share or 0.0) for one in known), default=1)
    scheduler = view.api.config.settings.scheduler
    return {
        "href": project_href,
        "agent_href": agent_href,
        "agent_fields": agent_fields,
        "tasks_href": tasks_href,
        "most_share": most or 1.0,
        "has_shares": bool(known),
        "window_hours": scheduler.usage_window_hours,
    }


async def _projects(view: View) -> list[ProjectBody]:
    return project_bodies(view.api, await view.api.engine.totals())


def _agent(view: View, name: str) -> AgentBody:
    return agent_body(view.api.config.state, name, {})


def _found(projects: Sequence[ProjectBody], name: str) -> ProjectBody:
    for one in projects:
        if one.id == name:
            return one
    raise ApiError("not_found", f"there is no project '{name[:100]}'")


def _compared(projects: Sequence[ProjectBody], own: ProjectBody) -> list[ProjectBody]:
    """Return the projects with the largest shares, and always the one that a page is about."""
    ordered = sorted(projects, key=lambda one: -(one.target_share or 0.0))
    largest = ordered[:MAX_SHARES]
    return largest if own in largest else [*largest[:-1], own]


def _with_query(view: View, path: str) -> str:
    query = view.request.query_string()
    return f"{path}?{query}" if query else path


def _target(view: View, name: str) -> float:
    """Return the share that the settings ask for; the dispatcher has it from its next round on."""
    settings = view.api.config.settings
    projects = [one.to_project(key) for key, one in settings.projects.items()]
    return {one.project_id: one.target for one in shares(projects, {})}.get(name, 0.0)


def _back(form: Form, otherwise: str) -> str:
    """Return the page of these that a form came from."""
    to = form.get("back")
    is_own = to == PROJECTS or to.startswith((f"{PROJECTS}?", f"{PROJECTS}/"))
    return to if is_own else otherwise


_STAYS = "did not change: the form had the present values"
_STATUS_WORDS = {
    "active": "is active: its tasks start again",
    "paused": "is paused: its tasks wait, and running ones continue",
    "draining": "drains: it takes no new tasks, and its queued tasks still run",
    "archived": "is archived: its tasks wait",
}


def _said_of_project(
    project: ProjectBody, wanted: ProjectPatchBody, before: float, after: float
) -> str:
    if isinstance(wanted.status, str):
        return f"project {project.id} {_STATUS_WORDS[wanted.status]}"
    effect = ""
    if before != after:
        effect = f"; its target share was {percent(before)} and is {percent(after)}"
    values = _values(project, wanted, PROJECT_FIELDS)
    return f"project {project.id} was changed: {values}{effect}"


def _said_of_agent(agent: AgentBody, wanted: AgentPatchBody) -> str:
    if isinstance(wanted.status, str):
        return f"agent {agent.id} {_STATUS_WORDS[wanted.status]}"
    return f"agent {agent.id} was changed: {_values(agent, wanted, AGENT_FIELDS)}"


def _values(after: ProjectBody | AgentBody, wanted: PatchBody, labels: Mapping[str, str]) -> str:
    """Return each field that was changed with what holds now, so that a slip is seen."""
    changed = [name for name in labels if getattr(wanted, name) is not UNSET]
    return ", ".join(f"{labels[name]} {_written(getattr(after, name))}" for name in changed)


def _written(value: float | str | None) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else value


ROUTES: tuple[PageRoute, ...] = (
    page_route(PROJECTS, show),
    page_route(f"{PROJECTS}/{{id}}", show_project),
    action_route(f"{PROJECTS}/{{id}}/change", change_project),
    action_route(f"{PROJECTS}/{{id}}/reset", reset_project),
    action_route(f"{AGENTS}/{{id}}/change", change_agent),
    action_route(f"{AGENTS}/{{id}}/reset", reset_agent),
    action_route("/ui/scheduler/pause", pause_all),
    action_route("/ui/scheduler/resume", resume_all),
)
