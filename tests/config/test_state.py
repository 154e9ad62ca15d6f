"""What settings are made of: a file, what was changed beside it, and what has left it."""

from __future__ import annotations

import tomllib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headgate.config.loading import decode
from headgate.config.overrides import (
    Change,
    Override,
    difference,
    file_value_of,
    in_force,
    with_overrides,
)
from headgate.config.sources import Table, merge_tables
from headgate.config.state import ConfigState
from headgate.core.snapshot import ProjectStatus, Standing
from headgate.errors import InvalidSettingError

FILE = """
[scheduler]
max_inflight = 5
alpha = 0.1

[projects.a]
credit_weight = 2.0

[projects.b]

[agents.coder]
capacity = 3

[targets.web]
kind = "http"
url = "http://127.0.0.1:9/run"
headers = { authorization = "Bearer canary-secret" }
default = true

[targets.shell]
kind = "command"
command = ["true"]

[budgets."session:s"]
limit_tokens = 100
"""


def tables_of(text: str) -> dict[str, Table]:
    return merge_tables(tomllib.loads(text), {}, {}, origin="file", is_again=True).tables


def situation_of(text: str = FILE) -> ConfigState:
    merged = merge_tables(tomllib.loads(text), {}, {}, origin="file")
    return ConfigState.initial(decode(merged), merged.tables)


def override(state: ConfigState, kind: Any, name: str, key: str, value: object) -> Override:
    file_value = file_value_of(state.tables, kind, name, key)
    return Override(kind=kind, name=name, key=key, value=value, file_value=file_value)


def reloaded(text: str, before: ConfigState | None = None) -> ConfigState:
    return (before or situation_of()).with_file(tables_of(text))


def test_a_key_that_the_scheduler_does_not_name_any_more_keeps_what_was() -> None:
    after = reloaded(
        FILE.replace("max_inflight = 5", "max_inflight = 0").replace("alpha = 0.1", "")
    )
    assert (after.settings.scheduler.max_inflight, after.settings.scheduler.alpha) == (5, 0.1)


def test_a_reload_takes_an_unsafe_alpha_only_with_the_key_that_allows_it() -> None:
    allowed = reloaded(FILE.replace("alpha = 0.1", "alpha = 1.0\nallow_unsafe_alpha = true"))
    assert allowed.settings.scheduler.resolved_alpha == 1.0
    with pytest.raises(InvalidSettingError, match=r"scheduler\.alpha: .*from 0 to 0\.5, not 1"):
        reloaded(FILE.replace("alpha = 0.1", "alpha = 1.0"))
    with pytest.raises(InvalidSettingError, match=r"scheduler\.alpha: .*from 0 to 0\.5, not 1"):
        reloaded(FILE.replace("alpha = 0.1", "allow_unsafe_alpha = false"), allowed)


def test_one_of_two_keys_that_exclude_each_other_takes_the_place_of_the_other() -> None:
    after = reloaded(FILE.replace("alpha = 0.1", 'optimize_for = "latency"'))
    assert after.settings.scheduler.alpha is None
    assert after.settings.scheduler.optimize_for == "latency"


@pytest.mark.parametrize(
    ("section", "name", "status"),
    [
        ("projects", "a", ProjectStatus.DRAINING),
        ("agents", "coder", Standing.DRAINING),
        ("targets", "web", Standing.DRAINING),
    ],
)
def test_what_left_the_file_drains_and_is_gone_when_it_has(
    section: str, name: str, status: object
) -> None:
    tables = tables_of(FILE)
    del tables[section][name]
    after = situation_of().with_file(tables)
    assert getattr(after.settings, section)[name].status is status
    assert after.draining == {(section, name)}
    gone = after.after_draining([(section, name)])
    assert name not in getattr(gone.settings, section)
    assert not gone.draining


def test_what_drains_still_drains_after_another_reload_and_comes_back_with_the_file() -> None:
    without = FILE.replace("[projects.a]\ncredit_weight = 2.0\n", "")
    drained = reloaded(without, reloaded(without))
    assert drained.settings.projects["a"].status is ProjectStatus.DRAINING
    assert drained.settings.projects["a"].credit_weight == 2.0
    back = reloaded(FILE, drained)
    assert (back.settings.projects["a"].status, back.draining) == (
        ProjectStatus.ACTIVE,
        frozenset(),
    )


def test_a_target_that_left_is_no_default_any_more() -> None:
    after = reloaded(FILE.replace("[targets.web]", "[targets.other]"))
    assert after.settings.default_target == "other"


def test_the_target_that_is_there_without_a_file_does_not_drain_by_itself() -> None:
    before = situation_of("")
    after = before.with_file(tables_of("[scheduler]\nmax_inflight = 3\n"))
    assert after.draining == frozenset()
    replaced = after.with_file(tables_of("[targets.shell]\nkind = 'command'\ncommand = ['true']\n"))
    assert replaced.draining == {("targets", "echo")}
    assert replaced.settings.default_target == "shell"


def test_the_default_project_never_drains() -> None:
    before = situation_of(FILE + "[projects.default]\ncredit_weight = 5.0\n")
    after = before.with_file(tables_of(FILE))
    assert after.settings.projects["default"].status is ProjectStatus.ACTIVE


def test_an_override_holds_until_the_file_changes_that_key() -> None:
    before = situation_of()
    patched = before.with_overrides([override(before, "projects", "a", "credit_weight", 9.0)])
    assert patched.settings.projects["a"].credit_weight == 9.0
    other = reloaded(FILE.replace("max_inflight = 5", "max_inflight = 6"), patched)
    assert other.settings.projects["a"].credit_weight == 9.0
    same_key = reloaded(FILE.replace("credit_weight = 2.0", "credit_weight = 3.0"), patched)
    assert same_key.settings.projects["a"].credit_weight == 3.0
    assert [one.key for one in same_key.ended()] == ["credit_weight"]


def test_null_takes_a_value_away() -> None:
    before = situation_of()
    patched = before.with_overrides([override(before, "agents", "coder", "capacity", None)])
    assert patched.settings.agents["coder"].capacity is None


def test_an_agent_that_nobody_declared_can_be_paused_and_takes_no_open_tasks() -> None:
    before = situation_of()
    patched = before.with_overrides([override(before, "agents", "guest", "status", "paused")])
    agent = patched.settings.agents["guest"]
    assert (agent.status, agent.accepts_open) == (Standing.PAUSED, False)


def test_a_budget_without_limits_is_none() -> None:
    before = situation_of()
    ones = [override(before, "budgets", "session:s", "limit_tokens", None)]
    assert before.with_overrides(ones).settings.budgets == {}
    ones.append(override(before, "budgets", "session:s", "limit_usd", 5))
    budget = before.with_overrides(ones).settings.budgets["session:s"]
    assert (budget.limit_tokens, budget.limit_usd) == (None, 5)


def test_the_target_that_is_there_without_a_file_can_be_paused() -> None:
    before = situation_of("")
    patched = before.with_overrides([override(before, "targets", "echo", "status", "paused")])
    assert patched.settings.targets["echo"].status is Standing.PAUSED


@pytest.mark.parametrize(
    ("kind", "name", "key", "value", "line"),
    [
        ("projects", "a", "credit_weight", -1.0, "projects.a.credit_weight: must be a number"),
        ("projects", "a", "status", "gone", "projects.a.status: must be one of"),
        ("agents", "coder", "capacity", 0, "agents.coder.capacity: must be a whole number"),
        ("budgets", "session:s", "window", "fortnight", 'budgets."session:s".window:'),
        ("budgets", "project:a", "limit_tokens", 5, "projects.a.budget_limit: "),
    ],
)
def test_an_override_that_cannot_be_right_is_refused_in_one_line(
    kind: str, name: str, key: str, value: object, line: str
) -> None:
    text = FILE.replace("[projects.a]", "[projects.a]\nbudget_limit = 7")
    before = situation_of(text)
    with pytest.raises(InvalidSettingError) as refused:
        before.with_overrides([override(before, kind, name, key, value)])
    assert str(refused.value).startswith(line)


def test_a_start_goes_on_with_the_overrides_that_fit_the_file() -> None:
    before = situation_of()
    fits = override(before, "projects", "a", "credit_weight", 9.0)
    contradicts = override(before, "projects", "a", "budget_limit", 7)
    after = situation_of(FILE + '[budgets."project:a"]\nlimit_tokens = 3\n')
    chosen = after.with_fitting_overrides([contradicts, fits])
    assert chosen.settings.projects["a"].credit_weight == 9.0
    assert chosen.settings.projects["a"].budget_limit is None


def test_settings_of_the_place_wait_for_a_restart_and_are_named_each_time() -> None:
    text = FILE + '[server]\nport = 9000\n[store]\nurl = "sqlite:///other.db"\n'
    before = situation_of()
    after = reloaded(text.replace("[scheduler]", "[scheduler]\nenabled = false"), before)
    keys = {one.key for one in difference(before.settings, after.written).needs_restart}
    assert keys == {"server.port", "store.url", "scheduler.enabled"}
    assert after.settings.server == before.settings.server
    assert after.settings.scheduler.enabled


def test_a_difference_names_keys_and_shows_no_secret() -> None:
    before = situation_of()
    text = FILE.replace("canary-secret", "canary-other").replace("= 5", "= 6")
    after = reloaded(
        text + '[targets.new]\nkind = "http"\nheaders = { x = "canary-new" }\n', before
    )
    found = difference(before.settings, after.settings)
    assert Change(key="scheduler.max_inflight", before=5, after=6) in found.changed
    assert {one.key for one in found.changed} == {
        "scheduler.max_inflight",
        "targets.web.headers",
        "targets.new",
    }
    assert b"canary" not in msgspec.json.encode(found)


VALUES: dict[str, dict[str, st.SearchStrategy[object]]] = {
    "projects": {
        "credit_weight": st.sampled_from([0.0, 1.0, 4.0]),
        "status": st.sampled_from(["active", "paused", "draining"]),
        "max_concurrent_agents": st.sampled_from([1, 7]),
    },
    "agents": {"capacity": st.sampled_from([1, 9]), "accepts_open": st.booleans()},
}


@st.composite
def files(draw: st.DrawFn) -> dict[str, Table]:
    found: dict[str, Table] = {name: {} for name in tables_of("")}
    for section, keys in VALUES.items():
        for name in draw(st.sets(st.sampled_from(["a", "b", "c"]))):
            table = {key: draw(values) for key, values in keys.items() if draw(st.booleans())}
            found[section][name] = table
    if draw(st.booleans()):
        found["scheduler"]["max_inflight"] = draw(st.integers(1, 9))
    return found


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[str, str, str, object]]:
    places = [(section, key) for section, keys in VALUES.items() for key in keys]
    count = draw(st.integers(0, 5))
    return [
        (section, draw(st.sampled_from(["a", "b", "c"])), key, draw(VALUES[section][key]))
        for section, key in (draw(st.sampled_from(places)) for _ in range(count))
    ]


@given(st.lists(st.tuples(files(), changes()), min_size=1, max_size=4))
@hypothesis_settings(deadline=None, max_examples=150)
def test_every_key_is_as_it_was_last_changed_by_hand_or_by_the_file(
    steps: list[tuple[dict[str, Table], list[tuple[str, str, str, object]]]],
) -> None:
    state = ConfigState.initial(decode(merge_tables({}, {}, {}, origin="")), tables_of(""))
    held: dict[tuple[str, str, str], tuple[object, object]] = {}
    for file, patches in steps:
        state = state.with_file(file)
        state = msgspec.structs.replace(
            state,
            overrides=tuple(one for one in state.overrides if one not in state.ended()),
        )
        held = {
            place: (value, said)
            for place, (value, said) in held.items()
            if file_value_of(state.tables, *place) == said
            and (place[0] == "agents" or place[1] in state.tables[place[0]])
        }
        for section, name, key, value in patches:
            if section == "projects" and name not in state.settings.projects:
                continue
            new = override(state, section, name, key, value)
            others = {one.path: one for one in state.overrides} | {new.path: new}
            state = state.with_overrides(others.values())
            held[new.path] = (value, new.file_value)
        for (section, name, key), (value, _) in held.items():
            shown = getattr(getattr(state.settings, section)[name], key)
            assert getattr(shown, "value", shown) == value


def test_overrides_leave_the_tables_of_the_file_alone() -> None:
    before = situation_of()
    tables = msgspec.json.encode(before.tables)
    one = override(before, "projects", "a", "status", "paused")
    with_overrides(before.tables, [one])
    assert msgspec.json.encode(before.tables) == tables
    assert in_force(before.tables, [one]) == (one,)
