"""The routes of administration: projects, agents, targets, budgets, the switch, the reload.

A change here is an override: it holds until the file changes that key. Rule: what is answered never
has a secret in it; of headers and variables only their names are shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from headgate.api.api import Api, Route, actor_of
from headgate.api.callers import LOCAL, Caller
from headgate.api.errors import ApiError, invalid_field
from headgate.api.http.request import Request, read_limit
from headgate.api.http.response import Response, json_response
from headgate.api.http.slices import mapped
from headgate.api.schema.admin import (
    AgentBody,
    AgentListBody,
    AgentPatchBody,
    AuditEntryBody,
    AuditListBody,
    BudgetBody,
    BudgetListBody,
    BudgetPatchBody,
    ChangeBody,
    ClosureListBody,
    OpenBody,
    PatchBody,
    ProjectBody,
    ProjectListBody,
    ProjectPatchBody,
    ReloadBody,
    SlotPatchBody,
    SwitchBody,
    TargetBody,
    TargetListBody,
    TargetPatchBody,
)
from headgate.api.slots import (
    OPENED,
    closures_by_name,
    known_closures,
    one_slot,
    show_slot,
    shown_closures,
)
from headgate.api.submission import check_unknown, excerpt, read_body
from headgate.budgets.status import ScopeStatus, has_limit
from headgate.config import AgentSettings, Settings, budget_warnings, budgets
from headgate.config.budget_limits import scope_of
from headgate.config.messages import key_path
from headgate.config.overrides import BUDGET_KEYS, PATCHABLE, Change, OverrideKind, written_table
from headgate.config.settings import DEFAULT_PROJECT
from headgate.config.state import ConfigState
from headgate.core.budgets.scopes import ROOT, ROOT_NAME, Scope, parse_scope
from headgate.core.budgets.windows import format_window
from headgate.core.fair_share import Share
from headgate.core.gates import GateClosure, GateKind, GatePart
from headgate.core.money import plain_usd
from headgate.core.slots.status import SlotBody
from headgate.core.snapshot import BUILT_IN_AGENT
from headgate.core.task import UPSTREAM_PREFIX
from headgate.core.task_view import ClosureBody, closure_body, exact_moment
from headgate.core.text import did_you_mean, nearest
from headgate.errors import InvalidFieldError, InvalidSettingError
from headgate.storage.audit import AuditEntry, AuditRow
from headgate.storage.store import LaneCount, Totals

# Projects, agents, targets and budgets as administrators see them: in force, and from where.

MAX_AGENTS = 10_000


class Count(NamedTuple):
    """What waits and what is in flight."""

    queued: int = 0
    inflight: int = 0


Counts = dict[str, Count]
NOTHING = Count()


def counts_by(lanes: Iterable[LaneCount], column: str) -> Counts:
    """Sum up what lanes have, by their project or their agent."""
    counts: Counts = {}
    for lane in lanes:
        if lane.queued or lane.inflight:
            name = getattr(lane, column)
            known = counts.get(name, NOTHING)
            counts[name] = Count(known.queued + lane.queued, known.inflight + lane.inflight)
    return counts


def project_body(
    state: ConfigState, name: str, counts: Counts, share: Share | None = None
) -> ProjectBody:
    """Return a project that there is, with its share where that is known."""
    settings = state.settings.projects[name]
    project = settings.to_project(name)
    count = counts.get(name, NOTHING)
    return ProjectBody(
        id=name,
        name=settings.name,
        credit_weight=settings.credit_weight,
        max_concurrent_agents=project.max_concurrent_agents,
        budget_limit=settings.budget_limit,
        status=settings.status.value,
        queued=count.queued,
        inflight=count.inflight,
        configured=_is_configured(state, "projects", name) or name == DEFAULT_PROJECT,
        overridden=state.overridden_fields("projects", name),
        target_share=None if share is None else round(share.target, 6),
        actual_share=None if share is None else round(share.actual, 6),
        deficit=None if share is None else round(share.deficit, 6),
        tokens=None if share is None else share.tokens,
    )


def listed_agents(state: ConfigState, counts: Counts) -> list[str]:
    """Return the agents that decisions know or that have tasks, as many as are shown."""
    known = (agent.id for agent in state.settings.core_agents())
    busy = sorted(name for name in counts if name)
    return list(dict.fromkeys((*known, *busy)))[:MAX_AGENTS]


Closed = Mapping[str, Sequence[GateClosure]]
"""What closes the things of one kind, by name."""

NOTHING_CLOSED: Closed = MappingProxyType({})


def closure_bodies(closed: Closed, name: str) -> list[ClosureBody]:
    """Return what closes one thing."""
    return [closure_body(one) for one in closed.get(name, ())]


def agent_body(
    state: ConfigState, name: str, counts: Counts, closed: Closed = NOTHING_CLOSED
) -> AgentBody:
    """Return an agent, also one that nobody has declared."""
    count = counts.get(name, NOTHING)
    if name == BUILT_IN_AGENT:
        return _built_in_body(state, count)
    settings = state.settings.agents.get(name) or AgentSettings(accepts_open=False)
    agent = settings.to_agent(name, state.settings.scheduler)
    return AgentBody(
        id=name,
        type=settings.type,
        capacity=agent.capacity,
        accepts_open=agent.accepts_open,
        status=settings.status.value,
        queued=count.queued,
        inflight=count.inflight,
        configured=_is_configured(state, "agents", name),
        overridden=state.overridden_fields("agents", name),
        closures=closure_bodies(closed, name),
    )


def _built_in_body(state: ConfigState, count: Count) -> AgentBody:
    """Return the built-in agent; it drains while another one accepts open tasks."""
    settings = state.settings
    is_taking = any(agent.id == BUILT_IN_AGENT for agent in settings.core_agents())
    return AgentBody(
        id=BUILT_IN_AGENT,
        type="",
        capacity=settings.scheduler.max_inflight,
        accepts_open=is_taking,
        status="active" if is_taking else "draining",
        queued=count.queued,
        inflight=count.inflight,
        configured=False,
        overridden=[],
        built_in=True,
    )


def target_body(state: ConfigState, name: str, closed: Closed = NOTHING_CLOSED) -> TargetBody:
    """Return a target that there is, without anything that may be a secret."""
    target = state.settings.all_targets[name]
    return TargetBody(
        id=name,
        kind=str(type(target).__struct_config__.tag),
        status=target.status.value,
        default=name == state.settings.default_target,
        slot=target.slot,
        provider=target.provider,
        estimate_usd=None if target.estimate_usd is None else str(target.estimate_usd),
        estimate_tokens=target.estimate_tokens,
        headers=sorted(getattr(target, "headers", {})),
        env=sorted(getattr(target, "env", {})),
        configured=("targets", name) not in state.draining,
        overridden=state.overridden_fields("targets", name),
        closures=closure_bodies(closed, name),
    )


def budget_bodies(state: ConfigState, closed: Closed = NOTHING_CLOSED) -> list[BudgetBody]:
    """Return what every scope with a limit may use."""
    written = {scope_of(name): one.reserve for name, one in state.settings.budgets.items()}
    reserves = {scope: one.value for scope, one in written.items() if one is not None}
    return [
        BudgetBody(
            scope=scope,
            limit_usd=_usd(limit.limit_micro_usd),
            limit_tokens=limit.limit_tokens,
            window=format_window(limit.window),
            overridden=state.overridden_fields("budgets", ROOT_NAME if scope == ROOT else scope),
            closures=closure_bodies(closed, scope),
            reserve=reserves.get(scope),
        )
        for scope, limit in budgets(state.settings).items()
    ]


def _usd(micro_usd: int | None) -> str | None:
    return None if micro_usd is None else plain_usd(micro_usd)


def _is_configured(state: ConfigState, kind: str, name: str) -> bool:
    return name in state.tables.get(kind, {}) and (kind, name) not in state.draining


MAX_CLOSURES = 1_000

OK = 200
BUDGET_QUERY = ("scope",)


async def list_projects(api: Api, request: Request, _: str) -> Response:
    """Answer with all projects that belong to the caller."""
    projects = project_bodies(api, await api.engine.totals(), request.caller)
    return json_response(OK, ProjectListBody(projects=projects))


def project_bodies(api: Api, totals: Totals, caller: Caller = LOCAL) -> list[ProjectBody]:
    """Return the projects that belong to the caller, in the order of the file.

    A project is more than what one agent has in it, so whoever acts for an agent alone has none.
    What a project has of the whole is for those who are not bound.
    """
    state, counts = api.config.state, counts_by(totals.lanes, "project_id")
    sees_all = caller.may("admin") or not caller.is_bound
    own = () if caller.agent_id is not None else (caller.project_id,)
    names = [name for name in state.settings.projects if sees_all or name in own]
    shares = _shares(api) if sees_all else {}
    return [project_body(state, name, counts, shares.get(name)) for name in names]


async def show_project(api: Api, request: Request, name: str) -> Response:
    """Answer with a project that belongs to the caller."""
    projects = project_bodies(api, await api.engine.totals(), request.caller)
    known = {one.id: one for one in projects}
    _check_known(name in known, "project", name)
    return json_response(OK, known[name])


async def change_project(api: Api, request: Request, name: str) -> Response:
    """Change a project beside the file."""
    body = read_body(await request.json_body(), ProjectPatchBody)
    _check_known(name in api.config.settings.projects, "project", name)
    await patch(api, request, "projects", name, body)
    return await show_project(api, request, name)


async def list_agents(api: Api, _: Request, __: str) -> Response:
    """Answer with the agents that are configured, or have tasks now."""
    return json_response(OK, AgentListBody(agents=await agent_bodies(api)))


async def agent_bodies(api: Api) -> list[AgentBody]:
    """Return the agents that are configured, or have tasks now."""
    state, counts = api.config.state, await _counts(api, "agent_id")
    closed = await closures_by_name(api, "agent")
    return [agent_body(state, name, counts, closed) for name in listed_agents(state, counts)]


async def show_agent(api: Api, _: Request, name: str) -> Response:
    """Answer with an agent; any name is one that a task may bring about."""
    state, counts = api.config.state, await _counts(api, "agent_id")
    known = {agent.id for agent in state.settings.core_agents()}
    _check_known(name in known or name in counts, "agent", name)
    return json_response(OK, agent_body(state, name, counts, await closures_by_name(api, "agent")))


async def change_agent(api: Api, request: Request, name: str) -> Response:
    """Change an agent beside the file; one that is not there yet is made."""
    body = read_body(await request.json_body(), AgentPatchBody)
    await patch(api, request, "agents", name, body)
    counts, closed = await _counts(api, "agent_id"), await closures_by_name(api, "agent")
    return json_response(OK, agent_body(api.config.state, name, counts, closed))


async def list_targets(api: Api, _: Request, __: str) -> Response:
    """Answer with all targets."""
    state, closed = api.config.state, await closures_by_name(api, "target")
    bodies = [target_body(state, name, closed) for name in state.settings.all_targets]
    return json_response(OK, TargetListBody(targets=bodies))


async def show_target(api: Api, _: Request, name: str) -> Response:
    """Answer with a target."""
    state = api.config.state
    _check_known(name in state.settings.all_targets, "target", name)
    return json_response(OK, target_body(state, name, await closures_by_name(api, "target")))


async def change_target(api: Api, request: Request, name: str) -> Response:
    """Change a target beside the file; pause, resume or drain it."""
    body = read_body(await request.json_body(), TargetPatchBody)
    settings = api.config.settings
    _check_known(name in settings.all_targets, "target", name)
    if isinstance(body.slot, str) and body.slot not in settings.slots:
        slots = ", ".join(list(settings.slots)[:_NAMES_SHOWN]) or "none"
        raise InvalidFieldError("slot", f"there is no slot {excerpt(body.slot)!r}. Slots: {slots}")
    await patch(api, request, "targets", name, body)
    return await show_target(api, request, name)


async def change_slot(api: Api, request: Request, name: str) -> Response:
    """Change a key slot beside the file."""
    body = read_body(await request.json_body(), SlotPatchBody)
    await one_slot(api, name, request.caller)
    await patch(api, request, "slots", name, body)
    return await show_slot(api, request, name)


async def list_budgets(api: Api, _: Request, __: str) -> Response:
    """Answer with the limits of all budgets."""
    bodies = budget_bodies(api.config.state, await closures_by_name(api, "scope"))
    return json_response(OK, BudgetListBody(budgets=bodies))


async def change_budget(api: Api, request: Request, _: str) -> Response:
    """Change the limits of a scope beside the file."""
    given = request.query()
    check_unknown(given, BUDGET_QUERY)
    body = read_body(await request.json_body(), BudgetPatchBody)
    scope = _read_scope(given)
    if not body.reset and scope not in budgets(api.config.settings):
        body = _with_kept(body, await api.tracker.own_status(scope))
    await patch(api, request, "budgets", scope or ROOT_NAME, body)
    return await list_budgets(api, request, "")


def _with_kept(body: BudgetPatchBody, status: ScopeStatus) -> BudgetPatchBody:
    """Return a change of a budget that a client has made, beside the settings, as a whole one."""
    if not has_limit(status):
        return body
    kept = {
        "limit_usd": _usd(status.limit_micro_usd),
        "limit_tokens": status.limit_tokens,
        "window": status.window,
    }
    left_out = {key: one for key, one in kept.items() if getattr(body, key) is msgspec.UNSET}
    return msgspec.structs.replace(body, **left_out)


async def delete_budget(api: Api, request: Request, _: str) -> Response:
    """Take the limits of a scope away; what was spent stays in the journal."""
    given = request.query()
    check_unknown(given, BUDGET_QUERY)
    scope = _read_scope(given)
    name = scope or ROOT_NAME
    state = api.config.state
    keys = BUDGET_KEYS
    if name in state.tables.get("budgets", {}):
        await api.config.override("budgets", name, dict.fromkeys(keys), actor_of(request))
    elif state.overridden("budgets", name):
        await api.config.override("budgets", name, {}, actor_of(request), resets=keys)
    elif scope in budgets(state.settings):
        raise _set_elsewhere(scope)
    else:
        # A client has made it, beside the settings.
        _check_known(has_limit(await api.tracker.own_status(scope)), "budget", name)
        await api.tracker.set_budget(scope)
        await api.record(request, "budget.delete", name)
    api.engine.ask_budgets()
    return await list_budgets(api, request, "")


def _read_scope(given: dict[str, str]) -> Scope:
    if "scope" not in given:
        raise ApiError(
            "missing_field", "missing required field 'scope'", details={"field": "scope"}
        )
    text = given["scope"]
    return ROOT if text == ROOT_NAME else parse_scope(text, field="scope")


def _set_elsewhere(scope: Scope) -> ApiError:
    """Say which setting, other than those of budgets, limits a scope."""
    if scope == ROOT:
        return invalid_field("scope", "scheduler.global_budget limits the root; change that")
    project = scope.partition(":")[2]
    line = f"budgetLimit of project '{excerpt(project)}' limits it; change the project"
    return invalid_field("scope", line)


async def list_closures(api: Api, _: Request, __: str) -> Response:
    """Answer with everything that keeps tasks from starting, and who closed it."""
    found = shown_closures(await api.engine.closures())
    bodies = await mapped(found[:MAX_CLOSURES], closure_body)
    return json_response(OK, ClosureListBody(closures=bodies, count=len(found)))


async def open_closed(api: Api, request: Request, _: str) -> Response:
    """Open something that was closed, before its time."""
    body = read_body(await request.json_body(), OpenBody)
    await opened(api, request, OPENED[body.kind], body.name)
    return await list_closures(api, request, "")


async def opened(api: Api, request: Request, kind: GateKind, name: str) -> None:
    """Open a slot, a target, an agent or a budget; what closed it may close it again."""
    if kind == "scope":
        name = parse_scope(name, field="name")
        _check_known(await _is_budget(api, name), "budget", name)
    if kind == "target":
        settings = api.config.settings
        is_upstream = name.removeprefix(UPSTREAM_PREFIX) in settings.all_upstreams
        is_known = name in settings.all_targets or (
            name.startswith(UPSTREAM_PREFIX) and is_upstream
        )
        _check_known(is_known, "target", name)
    entry = AuditEntry(actor=actor_of(request), action=f"{kind}.open", subject=name)
    if kind == "slot":
        await api.slots.reopen(name)
    await api.engine.open_gate(GatePart(kind, name), entry)


async def _is_budget(api: Api, scope: str) -> bool:
    """Tell whether a scope has a limit, or is closed all the same."""
    if has_limit(await api.tracker.own_status(scope)):
        return True
    return any(one.part == GatePart("scope", scope) for one in await known_closures(api))


async def pause(api: Api, request: Request, _: str) -> Response:
    """Start nothing new, until it is resumed; tasks are still taken."""
    await api.config.pause(actor_of(request), is_paused=True)
    return json_response(OK, SwitchBody(paused=True))


async def resume(api: Api, request: Request, _: str) -> Response:
    """Start tasks again."""
    await api.config.pause(actor_of(request), is_paused=False)
    return json_response(OK, SwitchBody(paused=False))


async def reload(api: Api, request: Request, _: str) -> Response:
    """Read the settings file again, and answer with what changed."""
    return json_response(OK, await reloaded(api, request))


async def reloaded(api: Api, request: Request) -> ReloadBody:
    """Read the settings file again, and return what changed."""
    try:
        found = await api.config.reload(actor_of(request))
    except InvalidSettingError as error:
        count = len(error.others)
        more = f"; {count} more of it: headgate config check lists them" if count else ""
        line = f"{error}{more}"
        raise ApiError("invalid_settings", line, details={"field": error.field}) from None
    return ReloadBody(
        changed=change_bodies(found.changed),
        needs_restart=change_bodies(found.needs_restart),
        kept=list(found.kept),
        warnings=budget_warnings(api.config.settings),
    )


def _shares(api: Api) -> dict[str, Share]:
    found = api.engine.outlook.shares()
    return {share.project_id: share for share in found or ()}


async def _counts(api: Api, column: str) -> Counts:
    return counts_by((await api.engine.totals()).lanes, column)


_LIMITS = ("limit_usd", "limit_tokens")
_NAMES_SHOWN = 20


async def patch(api: Api, request: Request, kind: OverrideKind, name: str, body: PatchBody) -> None:
    """Change something beside the file; a budget is named by its scope, the root as `root`."""
    config = api.config
    if written_table(config.state.tables, kind, name) is None:
        raise _unknown(kind.removesuffix("s"), name)
    values = _values(kind, body)
    if kind == "budgets" and any(values.get(key) is not None for key in _LIMITS):
        _check_project(config.settings, name)
    resets = tuple(_key(kind, field) for field in body.reset)
    if values or resets:
        await config.override(kind, name, values, actor_of(request), resets=resets)


def _check_project(settings: Settings, scope: str) -> None:
    """Refuse a budget of a project that does not exist: it would limit nothing."""
    kind, _, project = scope.partition("/")[0].partition(":")
    known = list(settings.projects)
    if kind != "project" or project in known:
        return
    near = nearest(project, known)
    line = f"there is no project {excerpt(project)!r}{f'; {did_you_mean(near)}' if near else '.'}"
    names = f"{', '.join(known[:_NAMES_SHOWN])}{' and more' if len(known) > _NAMES_SHOWN else ''}"
    add = f"Add it as [{key_path('projects', project)}] in the settings file, then headgate reload"
    raise InvalidFieldError("scope", f"{line} Projects: {names}. {add}")


def _values(kind: OverrideKind, body: PatchBody) -> Mapping[str, object]:
    names = PATCHABLE[kind].values()
    given = {name: getattr(body, name) for name in names}
    return {name: value for name, value in given.items() if value is not msgspec.UNSET}


def _key(kind: OverrideKind, field: str) -> str:
    keys = PATCHABLE[kind]
    if field not in keys:
        message = f"field 'reset': '{excerpt(field)}' is none of {', '.join(keys)}"
        raise ApiError("invalid_field", message, details={"field": "reset"})
    return keys[field]


def change_bodies(changes: tuple[Change, ...]) -> list[ChangeBody]:
    """Return changes as they are told."""
    return [ChangeBody(key=one.key, before=one.before, after=one.after) for one in changes]


def _check_known(is_known: bool, noun: str, name: str) -> None:  # noqa: FBT001
    if not is_known:
        raise _unknown(noun, name)


def _unknown(noun: str, name: str) -> ApiError:
    return ApiError("not_found", f"there is no {noun} '{excerpt(name)}'")


# `GET /audit`: who changed what, newest first.

QUERY_FIELDS = ("limit", "cursor")

_NUMBER = re.compile(r"[0-9]{1,18}")


async def list_audit(api: Api, request: Request, _: str) -> Response:
    """Answer with one page of changes."""
    given = request.query()
    check_unknown(given, QUERY_FIELDS)
    return json_response(OK, await audit_list(api, given))


async def audit_list(api: Api, given: dict[str, str]) -> AuditListBody:
    """Return one page of changes; `given` may have its `limit` and `cursor`."""
    page = await api.audit.page(before=read_number(given, "cursor"), limit=read_limit(given))
    entries = [_body(row) for row in page.rows]
    cursor = None if page.next_before is None else str(page.next_before)
    return AuditListBody(entries=entries, count=len(entries), next_cursor=cursor)


def read_number(given: dict[str, str], field: str) -> int | None:
    """Read where a page begins; None is the beginning."""
    text = given.get(field, "")
    if not text:
        return None
    if _NUMBER.fullmatch(text) is None:
        raise invalid_field(field, "must be a number")
    return int(text)


def _body(row: AuditRow) -> AuditEntryBody:
    fields = msgspec.structs.asdict(row) | {"at": exact_moment(row.at)}
    return AuditEntryBody(**fields)


# The table of the routes of administration.

ROUTES = (
    Route(
        "GET",
        "/closures",
        list_closures,
        "list what is closed: why, by whom, since when and until when",
        responses={200: ClosureListBody},
    ),
    Route(
        "POST",
        "/closures/open",
        open_closed,
        "open a slot, a target, an agent or a budget before its time",
        body=OpenBody,
        responses={200: ClosureListBody},
        errors=("not_found",),
    ),
    Route(
        "POST",
        "/scheduler/pause",
        pause,
        "pause everything: start nothing until a resume",
        responses={200: SwitchBody},
        errors=("not_found",),
    ),
    Route(
        "POST",
        "/scheduler/resume",
        resume,
        "start tasks again",
        responses={200: SwitchBody},
        errors=("not_found",),
    ),
    Route(
        "POST",
        "/scheduler/reload",
        reload,
        "read the settings file again",
        responses={200: ReloadBody},
        errors=("not_found", "invalid_settings"),
    ),
    Route(
        "GET",
        "/projects",
        list_projects,
        "list projects",
        "read",
        responses={200: ProjectListBody},
        errors=("not_found",),
    ),
    Route(
        "GET",
        "/projects/{id}",
        show_project,
        "show a project",
        "read",
        responses={200: ProjectBody},
    ),
    Route(
        "PATCH",
        "/projects/{id}",
        change_project,
        "change a project: its weight, cap, budget or status",
        body=ProjectPatchBody,
        responses={200: ProjectBody},
    ),
    Route(
        "GET",
        "/agents",
        list_agents,
        "list agents",
        responses={200: AgentListBody},
        errors=("not_found",),
    ),
    Route("GET", "/agents/{id}", show_agent, "show an agent", responses={200: AgentBody}),
    Route(
        "PATCH",
        "/agents/{id}",
        change_agent,
        "change an agent: its capacity, type or status",
        body=AgentPatchBody,
        responses={200: AgentBody},
    ),
    Route(
        "GET",
        "/targets",
        list_targets,
        "list targets",
        responses={200: TargetListBody},
        errors=("not_found",),
    ),
    Route(
        "GET",
        "/targets/{id}",
        show_target,
        "show a target",
        responses={200: TargetBody},
    ),
    Route(
        "PATCH",
        "/targets/{id}",
        change_target,
        "change a target: its slot, provider, estimate or status",
        body=TargetPatchBody,
        responses={200: TargetBody},
    ),
    Route(
        "PATCH",
        "/slots/{id}",
        change_slot,
        "change a key slot: how many tasks and calls may use it at a time",
        body=SlotPatchBody,
        responses={200: SlotBody},
    ),
    Route(
        "GET",
        "/budgets",
        list_budgets,
        "list the limits of budgets",
        responses={200: BudgetListBody},
        errors=("not_found",),
    ),
    Route(
        "PATCH",
        "/budgets",
        change_budget,
        "change the limits of a scope",
        body=BudgetPatchBody,
        responses={200: BudgetListBody},
        query=BUDGET_QUERY,
        errors=("not_found",),
    ),
    Route(
        "DELETE",
        "/budgets",
        delete_budget,
        "remove the limits of a scope; its spending stays booked",
        responses={200: BudgetListBody},
        query=BUDGET_QUERY,
        errors=("not_found", "invalid_field", "missing_field"),
    ),
    Route(
        "GET",
        "/audit",
        list_audit,
        "say who changed what, newest first",
        responses={200: AuditListBody},
        query=QUERY_FIELDS,
        errors=("not_found",),
    ),
)
