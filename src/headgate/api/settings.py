"""`GET /settings`: the settings in force with their origins, and what the last reload changed.

Rule: what may be a secret is hidden before anything else is done with it, so that no search finds
it either.
"""

from __future__ import annotations

import msgspec

from headgate.api.admin import change_bodies, read_number
from headgate.api.api import Api, Route
from headgate.api.errors import invalid_field
from headgate.api.http.request import Request, read_limit
from headgate.api.http.response import Response, json_response
from headgate.api.http.slices import in_slices
from headgate.api.schema.admin import (
    LastReloadBody,
    OverrideBody,
    SettingBody,
    SettingsBody,
    VariableBody,
)
from headgate.api.submission import check_unknown, excerpt
from headgate.config import Settings
from headgate.config.loading import (
    DEFAULT_ORIGIN,
    each_displayed,
    hidden,
    referred_variables,
)
from headgate.config.messages import key_path
from headgate.config.overrides import PATCHABLE, Override, difference
from headgate.config.reload import LiveConfig, ReloadNote
from headgate.config.slot_keys import key_problem
from headgate.config.state import ConfigState
from headgate.core.task_view import exact_moment
from headgate.core.text import Steps

OK = 200
QUERY_FIELDS = ("section", "text", "changed", "limit", "cursor")
SECTIONS = Settings.__struct_fields__
OVERRIDE_ORIGIN = "override"

_FLAGS = {"": False, "false": False, "true": True}


class SettingsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which settings are meant: of a section, with a text in key or value, those that are set.

    `first` is how many of them are passed over.
    """

    section: str = ""
    text: str = ""
    is_changed: bool = False
    first: int = 0
    limit: int = 100


async def show_settings(api: Api, request: Request, _: str) -> Response:
    """Answer with one page of the settings in force."""
    return json_response(OK, await settings_body(api, read_query(request.query())))


def read_query(given: dict[str, str]) -> SettingsQuery:
    """Read which settings are meant."""
    check_unknown(given, QUERY_FIELDS)
    section, flag = given.get("section", ""), given.get("changed", "")
    if section and section not in SECTIONS:
        raise invalid_field("section", f"'{excerpt(section)}' is none of {', '.join(SECTIONS)}")
    if flag not in _FLAGS:
        raise invalid_field("changed", "must be true or false")
    return SettingsQuery(
        section=section,
        text=given.get("text", "").strip(),
        is_changed=_FLAGS[flag],
        first=read_number(given, "cursor") or 0,
        limit=read_limit(given),
    )


async def settings_body(api: Api, query: SettingsQuery) -> SettingsBody:
    """Return one page of the settings in force, with what became of the file."""
    config = api.config
    state = config.state
    values = await in_slices(_values(state))
    found = [one for one in values if _is_meant(query, one)]
    end = query.first + query.limit
    return SettingsBody(
        file=_file(config),
        settings=found[query.first : end],
        matching=len(found),
        next_cursor=str(end) if end < len(found) else None,
        overrides=[_override(one) for one in _in_force(state)],
        needs_restart=change_bodies(difference(state.settings, state.written).needs_restart),
        variables=_variables(config),
        last_reload=_last_reload(config.reloads.last),
    )


def _variables(config: LiveConfig) -> list[VariableBody]:
    """Say which variables the node has: a shell beside it may have others."""
    if config.origin is None:
        return []
    environ = config.origin.environ
    return [
        VariableBody(
            name=name,
            is_set=name in environ,
            problem=key_problem(config.settings, name, environ),
        )
        for name in sorted(referred_variables(config.settings))
    ]


def _file(config: LiveConfig) -> str | None:
    origin = config.origin
    return None if origin is None or origin.path is None else str(origin.path)


def _values(state: ConfigState) -> Steps[list[SettingBody]]:
    overridden = {key_path(*one.path) for one in _in_force(state)}
    values: list[SettingBody] = []
    for key, one in each_displayed(state.settings, state.origins):
        origin = OVERRIDE_ORIGIN if key in overridden else one.origin
        values.append(SettingBody(key=key, value=one.value, origin=origin))
        yield
    return values


def _is_meant(query: SettingsQuery, one: SettingBody) -> bool:
    if query.section and one.key.partition(".")[0] != query.section:
        return False
    if query.is_changed and one.origin == DEFAULT_ORIGIN:
        return False
    text = query.text.casefold()
    return not text or text in one.key.casefold() or text in str(one.value).casefold()


def _in_force(state: ConfigState) -> list[Override]:
    """Return what was changed beside the file and holds; the switch of everything is no key."""
    return [one for one in state.in_force() if one.kind != "scheduler"]


def _override(one: Override) -> OverrideBody:
    return OverrideBody(
        key=key_path(*one.path),
        kind=one.kind,
        name=one.name,
        field=next(field for field, key in PATCHABLE[one.kind].items() if key == one.key),
        value=hidden(one.key, one.value),
        file_value=hidden(one.key, one.file_value),
        at=exact_moment(one.at),
        by=one.by,
    )


def _last_reload(note: ReloadNote | None) -> LastReloadBody | None:
    if note is None:
        return None
    return LastReloadBody(
        at=exact_moment(note.at),
        by=note.by,
        changed=change_bodies(note.changed),
        problem=note.problem,
    )


ROUTES = (
    Route(
        "GET",
        "/settings",
        show_settings,
        "show the settings in force, and what the last reload changed",
        responses={200: SettingsBody},
        query=QUERY_FIELDS,
        errors=("not_found",),
    ),
)
