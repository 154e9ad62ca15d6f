"""The routes of administration: projects, agents, targets, budgets, the switch, the reload.

A change here is an override: it holds until the file changes that key. Rule: what is answered never
has a secret in it; of headers and variables only their names are shown.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headgate.administration import Administration
from headgate.bodies.admin import (
    AgentBody,
    AgentListBody,
    AgentPatchBody,
    BudgetListBody,
    BudgetPatchBody,
    ChangeBody,
    PatchBody,
    ProjectBody,
    ProjectListBody,
    ProjectPatchBody,
    ReloadBody,
    SwitchBody,
    TargetListBody,
    TargetPatchBody,
)
from headgate.core.budgets.scopes import parse_scope
from headgate.core.shares import Share
from headgate.errors import InvalidSettingError
from headgate.intake.bodies import check_unknown, read_body, shown
from headgate.settings.changes import Change
from headgate.settings.overrides import PATCHABLE, OverrideKind, written_table
from headgate.store import Totals
from headgate.web.api import Api
from headgate.web.callers import LOCAL, Caller
from headgate.web.handlers.admin_views import (
    Counts,
    agent_body,
    agents_shown,
    budget_bodies,
    counts_by,
    project_body,
    target_body,
)
from headgate.web.handlers.auditing import actor_of
from headgate.web.http.answers import Answer, json_answer
from headgate.web.http.requests import Request
from headgate.web.refusals import Refusal

OK = 200
BUDGET_QUERY = ("scope",)


async def list_projects(api: Api, request: Request, _: str) -> Answer:
    """Answer with all projects that belong to the caller."""
    projects = project_bodies(api, await api.engine.totals(), request.caller)
    return json_answer(OK, ProjectListBody(projects=projects))


def project_bodies(api: Api, totals: Totals, caller: Caller = LOCAL) -> list[ProjectBody]:
    """Return the projects that belong to the caller, in the order of the file.

    A project is more than what one agent has in it, so whoever acts for an agent alone has none.
    What a project has of the whole is for those who are not bound.
    """
    situation, counts = administration_of(api).situation, counts_by(totals.lanes, "project_id")
    sees_all = caller.may("admin") or not caller.is_bound
    own = () if caller.agent_id is not None else (caller.project_id,)
    names = [name for name in situation.settings.projects if sees_all or name in own]
    shares = _shares(api) if sees_all else {}
    return [project_body(situation, name, counts, shares.get(name)) for name in names]


async def show_project(api: Api, request: Request, name: str) -> Answer:
    """Answer with a project that belongs to the caller."""
    projects = project_bodies(api, await api.engine.totals(), request.caller)
    known = {one.id: one for one in projects}
    _check_known(name in known, "project", name)
    return json_answer(OK, known[name])


async def change_project(api: Api, request: Request, name: str) -> Answer:
    """Change a project beside the file."""
    body = read_body(await request.json_body(), ProjectPatchBody)
    _check_known(name in administration_of(api).settings.projects, "project", name)
    await patch(api, request, "projects", name, body)
    return await show_project(api, request, name)


async def list_agents(api: Api, _: Request, __: str) -> Answer:
    """Answer with the agents that are configured, or have tasks now."""
    return json_answer(OK, AgentListBody(agents=await agent_bodies(api)))


async def agent_bodies(api: Api) -> list[AgentBody]:
    """Return the agents that are configured, or have tasks now."""
    situation, counts = administration_of(api).situation, await _counts(api, "agent_id")
    return [agent_body(situation, name, counts) for name in agents_shown(situation, counts)]


async def show_agent(api: Api, _: Request, name: str) -> Answer:
    """Answer with an agent; any name is one that a task may bring about."""
    situation, counts = administration_of(api).situation, await _counts(api, "agent_id")
    _check_known(name in situation.settings.agents or name in counts, "agent", name)
    return json_answer(OK, agent_body(situation, name, counts))


async def change_agent(api: Api, request: Request, name: str) -> Answer:
    """Change an agent beside the file; one that is not there yet is made."""
    body = read_body(await request.json_body(), AgentPatchBody)
    await patch(api, request, "agents", name, body)
    return json_answer(
        OK, agent_body(administration_of(api).situation, name, await _counts(api, "agent_id"))
    )


async def list_targets(api: Api, _: Request, __: str) -> Answer:
    """Answer with all targets."""
    situation = administration_of(api).situation
    bodies = [target_body(situation, name) for name in situation.settings.all_targets]
    return json_answer(OK, TargetListBody(targets=bodies))


async def show_target(api: Api, _: Request, name: str) -> Answer:
    """Answer with a target."""
    situation = administration_of(api).situation
    _check_known(name in situation.settings.all_targets, "target", name)
    return json_answer(OK, target_body(situation, name))


async def change_target(api: Api, request: Request, name: str) -> Answer:
    """Pause, resume or drain a target."""
    body = read_body(await request.json_body(), TargetPatchBody)
    _check_known(name in administration_of(api).settings.all_targets, "target", name)
    await patch(api, request, "targets", name, body)
    return await show_target(api, request, name)


async def list_budgets(api: Api, _: Request, __: str) -> Answer:
    """Answer with the limits of all budgets."""
    return json_answer(OK, BudgetListBody(budgets=budget_bodies(administration_of(api).situation)))


async def change_budget(api: Api, request: Request, _: str) -> Answer:
    """Change the limits of a scope beside the file."""
    given = request.query()
    check_unknown(given, BUDGET_QUERY)
    body = read_body(await request.json_body(), BudgetPatchBody)
    if "scope" not in given:
        raise Refusal("missing_field", "missing required field 'scope'", details={"field": "scope"})
    scope = parse_scope(given["scope"], field="scope")
    await patch(api, request, "budgets", scope or "root", body)
    return await list_budgets(api, request, "")


async def pause(api: Api, request: Request, _: str) -> Answer:
    """Start nothing new, until it is resumed; tasks are still taken."""
    await administration_of(api).pause(actor_of(request), is_paused=True)
    return json_answer(OK, SwitchBody(paused=True))


async def resume(api: Api, request: Request, _: str) -> Answer:
    """Start tasks again."""
    await administration_of(api).pause(actor_of(request), is_paused=False)
    return json_answer(OK, SwitchBody(paused=False))


async def reload(api: Api, request: Request, _: str) -> Answer:
    """Read the settings file again, and answer with what changed."""
    return json_answer(OK, await reloaded(api, request))


async def reloaded(api: Api, request: Request) -> ReloadBody:
    """Read the settings file again, and return what changed."""
    try:
        found = await administration_of(api).reload(actor_of(request))
    except InvalidSettingError as error:
        raise Refusal("invalid_settings", str(error), details={"field": error.field}) from None
    return ReloadBody(
        changed=change_bodies(found.changed), needs_restart=change_bodies(found.needs_restart)
    )


def administration_of(api: Api) -> Administration:
    """Return the settings of this node, which only change through it."""
    if api.administration is None:
        raise Refusal("not_found", "this service is not administered over HTTP")
    return api.administration


def _shares(api: Api) -> dict[str, Share]:
    found = None if api.outlook is None else api.outlook.shares()
    return {share.project_id: share for share in found or ()}


async def _counts(api: Api, column: str) -> Counts:
    return counts_by((await api.engine.totals()).lanes, column)


async def patch(api: Api, request: Request, kind: OverrideKind, name: str, body: PatchBody) -> None:
    """Change something beside the file; a budget is named by its scope, the root as `root`."""
    administration = administration_of(api)
    if written_table(administration.situation.tables, kind, name) is None:
        raise _unknown(kind.removesuffix("s"), name)
    values = _values(kind, body)
    resets = tuple(_key(kind, field) for field in body.reset)
    if values or resets:
        await administration.override(kind, name, values, actor_of(request), resets=resets)


def _values(kind: OverrideKind, body: PatchBody) -> Mapping[str, object]:
    names = PATCHABLE[kind].values()
    given = {name: getattr(body, name) for name in names}
    return {name: value for name, value in given.items() if value is not msgspec.UNSET}


def _key(kind: OverrideKind, field: str) -> str:
    keys = PATCHABLE[kind]
    if field not in keys:
        message = f"field 'reset': '{shown(field)}' is none of {', '.join(keys)}"
        raise Refusal("invalid_field", message, details={"field": "reset"})
    return keys[field]


def change_bodies(changes: tuple[Change, ...]) -> list[ChangeBody]:
    """Return changes as they are told."""
    return [ChangeBody(key=one.key, before=one.before, after=one.after) for one in changes]


def _check_known(is_known: bool, noun: str, name: str) -> None:  # noqa: FBT001
    if not is_known:
        raise _unknown(noun, name)


def _unknown(noun: str, name: str) -> Refusal:
    return Refusal("not_found", f"there is no {noun} '{shown(name)}'")
