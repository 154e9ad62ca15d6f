"""The settings of the gateway: what may be written, what is refused, and what a reload changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.running import FAST, Running, running
from headgate.cli.config_report import check_settings, settings_in_effect
from headgate.config import (
    GatewaySettings,
    Settings,
    UpstreamSettings,
    load_settings,
    rate_limits,
    warnings_of,
)
from headgate.config.settings import BUILT_IN_UPSTREAMS
from headgate.config.slot_keys import read_upstream_key, upstream_headers
from headgate.core.estimates import Reserve
from headgate.errors import InvalidSettingError
from headgate.executors.targets import (
    CallableTarget,
    CommandTarget,
    HttpTarget,
    PullTarget,
    Target,
    uses_gateway,
)

CANARY = "sk-canary-of-the-upstream-0123456789"
SLOT = '[[slots]]\nname = "work"\nprovider = "zai"\nkey_env = "ZAI_KEY"\n'
OTHER_SLOTS = "".join(
    SLOT.replace("work", name).replace('"zai"', f'"{name}"') for name in ("anthropic", "openai")
)
HOUSE = '[upstreams.house]\nkind = "openai"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "headgate.toml"


def loaded(file: Path, text: str) -> Settings:
    file.write_text(text)
    return load_settings(file, {}, {})


def test_without_a_word_in_the_file_two_upstreams_are_there() -> None:
    found = load_settings(None, {}, {})
    assert found.gateway == GatewaySettings()
    assert (found.upstreams, found.models) == ({}, {})
    assert {name: (one.kind, one.key_env) for name, one in found.all_upstreams.items()} == {
        "anthropic": ("anthropic", "ANTHROPIC_API_KEY"),
        "openai": ("openai", "OPENAI_API_KEY"),
    }


def test_an_upstream_of_the_file_takes_the_place_of_the_built_in_one(file: Path) -> None:
    text = '[upstreams.house]\nkind = "openai"\n[upstreams.openai]\nkind = "openai"\n'
    found = loaded(file, text).all_upstreams
    assert list(found) == ["house", "openai", "anthropic"]
    assert not found["openai"].has_key
    assert found["anthropic"] == BUILT_IN_UPSTREAMS["anthropic"]


GOOD = [
    'kind = "openai"\nbase_url = "http://127.0.0.1:11434/v1"',
    'kind = "openai"\nbase_url = "http://gpu-box:8000/v1"',
    'kind = "openai"\nbase_url = "https://h.example/v1/"\nkey_env = "HOUSE_KEY"',
    'kind = "openai"\nbase_url = "http://[::1]:8000"\nkey_env = "HOUSE_KEY"',
    'kind = "anthropic"\nbase_url = "https://api.z.ai/api/anthropic"\nslots = ["work"]',
    'kind = "openai"\nmodels = ["gpt-*", "o[34]*", "acme/x"]\nmax_inflight = 1',
    'kind = "openai"\nheaders = { X-Team = "{env.TEAM}", X-Plain = "a b" }',
]


@pytest.mark.parametrize("table", GOOD)
def test_a_good_upstream_is_taken(table: str, file: Path) -> None:
    found = loaded(file, f"[upstreams.house]\n{table}\n{SLOT}")
    assert warnings_of(found) == []
    assert found.all_upstreams["house"].kind in ("anthropic", "openai")


@pytest.mark.parametrize(
    ("kind", "base_url", "url", "api_url"),
    [
        ("anthropic", None, "https://api.anthropic.com", "https://api.anthropic.com/v1"),
        ("openai", None, "https://api.openai.com/v1", "https://api.openai.com/v1"),
        ("anthropic", "https://h/a/", "https://h/a", "https://h/a/v1"),
        ("anthropic", "https://h/v1", "https://h/v1", "https://h/v1"),
        ("openai", "http://127.0.0.1:1/", "http://127.0.0.1:1", "http://127.0.0.1:1"),
    ],
)
def test_a_base_url_is_what_clients_of_its_protocol_take(
    kind: str, base_url: str | None, url: str, api_url: str, file: Path
) -> None:
    written = "" if base_url is None else f'base_url = "{base_url}"'
    found = loaded(file, f'[upstreams.x]\nkind = "{kind}"\n{written}').upstreams["x"]
    assert (found.url, found.api_url) == (url, api_url)


UPSTREAM = "upstreams.house"
WRONG_UPSTREAMS: list[tuple[str, str, str]] = [
    ('kind = "gemini"', "kind", "must be one of anthropic, openai, not 'gemini'"),
    ('base_url = "https://h"', "kind", "is missing; write it"),
    ('kind = "openai"\nmax_inflight = 0', "max_inflight", "whole number from 1 to 1,000,000"),
    ('kind = "openai"\nmodel = ["x"]', "model", "is not a setting; did you mean models?"),
    (
        'kind = "openai"\nkey_env = "HOUSE_KEY"\nslots = ["work"]',
        "key_env",
        "give either key_env or slots, not both",
    ),
    (
        'kind = "openai"\nslots = ["work", "spare"]',
        "slots[1]",
        "no [[slots]] has the name 'spare'; add one, or correct the name",
    ),
    (
        'kind = "openai"\nslots = ["work", "work"]',
        "slots[1]",
        "'work' is in the list already; leave it out",
    ),
    (
        'kind = "openai"\nslots = ["work"]',
        "slots[0]",
        "'work' is a slot of zai, and without base_url its key would go to openai; write base_url",
    ),
    *(
        (
            f'kind = "{kind}"\nslots = ["{slot}"]',
            "slots[0]",
            f"'{slot}' is a slot of {slot}, and an upstream of kind {kind} takes no key of {slot}",
        )
        for kind, slot in (("openai", "anthropic"), ("anthropic", "openai"))
    ),
    (
        f'kind = "openai"\nkey_env = "{CANARY}"',
        "key_env",
        "is the name of a variable, as OPENAI_API_KEY; the key itself is not written here",
    ),
    *(
        (
            f'kind = "openai"\n{key} = "{CANARY}"',
            key,
            "a key is not written into the file; name its variable, key_env, or slots",
        )
        for key in ("key", "api_key", "token")
    ),
    *(
        (
            f'kind = "openai"\nbase_url = "{url}"',
            "base_url",
            "must be an http:// or https:// URL",
        )
        for url in ("api.openai.com", "ftp://h/v1", "https://", "https://h:99999/", "https://h/ x")
    ),
    (
        f'kind = "openai"\nbase_url = "https://me:{CANARY}@h/v1"',
        "base_url",
        "has a user or a password in it; take it out",
    ),
    (
        'kind = "openai"\nbase_url = "https://h/v1?version=1"',
        "base_url",
        "has a ? or # in it, and paths are put behind it; take that out",
    ),
    *(
        (
            f'kind = "openai"\nbase_url = "http://gpu-box:8000/v1"\n{key}',
            "base_url",
            "would send the key unencrypted; write https, as http is for this machine only",
        )
        for key in ('key_env = "HOUSE_KEY"', 'slots = ["work"]')
    ),
    *(
        (
            f'kind = "openai"\nbase_url = "http://{host}:7420/v1"',
            "base_url",
            "is this service itself, so that calls would go round and round; name a provider",
        )
        for host in ("127.0.0.1", "localhost", "[::1]")
    ),
    ('kind = "openai"\nmodels = [""]', "models[0]", "must be a string of 1 to 2,000 characters"),
    (
        'kind = "openai"\nmodels = ["gpt-*", " "]',
        "models[1]",
        "is a name or a pattern as claude-*, printable, with no space at its ends",
    ),
    (
        'kind = "openai"\nheaders = { "A B" = "x" }',
        'headers."A B"',
        "is not the name of a header",
    ),
    (
        'kind = "openai"\nheaders = { Host = "x" }',
        "headers.Host",
        "is set for every request; leave it out",
    ),
    *(
        (
            f'kind = "openai"\nheaders = {{ {name} = "{CANARY}" }}',
            f"headers.{name}",
            "carries a key, which is not written into the file; use key_env or slots",
        )
        for name in ("Authorization", "X-Api-Key", "proxy-authorization")
    ),
    (
        'kind = "openai"\nheaders = { X-A = "{key}" }',
        "headers.X-A",
        "{key} is unknown; it may be {env.NAME}",
    ),
    (
        'kind = "openai"\nheaders = { X-A = "ü" }',
        "headers.X-A",
        "its value must be printable ASCII without spaces at its ends",
    ),
]


@pytest.mark.parametrize(("table", "key", "problem"), WRONG_UPSTREAMS)
def test_a_wrong_upstream_is_one_line_that_names_the_key_and_no_secret(
    table: str, key: str, problem: str, file: Path
) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        loaded(file, f"[upstreams.house]\n{table}\n{SLOT}{OTHER_SLOTS}")
    line = str(caught.value)
    assert caught.value.field == f"{UPSTREAM}.{key}"
    assert problem in caught.value.problem, line
    assert "\n" not in line
    assert CANARY not in line


@pytest.mark.parametrize("name", ["a/b", "a b", "ü", ".hidden", "a:b"])
def test_the_name_of_an_upstream_can_stand_in_a_route_and_in_a_path(name: str, file: Path) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        loaded(file, f'[upstreams."{name}"]\nkind = "openai"')
    assert caught.value.problem.startswith("an upstream's name is made of letters, digits and . _")


@pytest.mark.parametrize(
    ("server", "base_url", "is_loop"),
    [
        ("port = 8080", "http://127.0.0.1:8080/v1", True),
        ("port = 8080", "http://127.0.0.1:7420/v1", False),
        ("port = 0", "http://127.0.0.1:7420/v1", False),
        ('host = "0.0.0.0"', "http://localhost:7420/p/a/v1", True),
        ('host = "10.0.0.5"', "http://127.0.0.1:7420/v1", False),
        ('host = "10.0.0.5"', "http://10.0.0.5:7420/v1", True),
        ('advertise = "http://fleet.example:7420"', "http://fleet.example:7420/v1", True),
        ('advertise = "http://fleet.example:7420"', "http://other.example:7420/v1", False),
    ],
)
def test_no_upstream_is_the_service_itself(
    server: str, base_url: str, is_loop: bool, file: Path
) -> None:
    text = f'[server]\n{server}\n{HOUSE}base_url = "{base_url}"'
    if not is_loop:
        assert loaded(file, text).upstreams["house"].url == base_url
        return
    with pytest.raises(InvalidSettingError, match="is this service itself"):
        loaded(file, text)


def test_an_alias_has_members_in_their_order(file: Path) -> None:
    route = '["openai/gpt-5-mini", "house/acme/llama-3", "anthropic/claude-haiku-4-5"]'
    found = loaded(file, f"{HOUSE}[models.fast]\nroute = {route}")
    assert found.models["fast"].members == (
        ("openai", "gpt-5-mini"),
        ("house", "acme/llama-3"),
        ("anthropic", "claude-haiku-4-5"),
    )


def test_an_alias_may_have_the_name_of_a_model(file: Path) -> None:
    text = f'{HOUSE}models = ["gpt-*"]\n[models."gpt-5"]\nroute = ["house/gpt-5"]'
    assert loaded(file, text).models["gpt-5"].members == (("house", "gpt-5"),)


WRONG_ROUTES: list[tuple[str, str, str]] = [
    ("route = []", "route", "must be a list that is not empty"),
    ("", "route", "is missing; write it"),
    ('route = [""]', "route[0]", "must be a string of 1 to 2,000 characters"),
    (
        'route = ["openai/gpt-5", "nowhere/x"]',
        "route[1]",
        "there is no upstream 'nowhere'; known are anthropic, openai",
    ),
    (
        'route = ["gpt-5"]',
        "route[0]",
        "'gpt-5' does not say where; write the upstream before it, as \"openai/…\"",
    ),
    (
        'route = ["claude-haiku-4-5"]',
        "route[0]",
        "'claude-haiku-4-5' does not say where; write the upstream before it, as \"anthropic/…\"",
    ),
    (
        'route = ["openai"]',
        "route[0]",
        "'openai' names no model; write it behind, as \"openai/MODEL\"",
    ),
    (
        'route = ["openai/"]',
        "route[0]",
        "'openai/' names no model; write it behind, as \"openai/MODEL\"",
    ),
    ('route = ["/gpt-5"]', "route[0]", "there is no upstream ''; known are anthropic, openai"),
    (
        'route = ["fast"]',
        "route[0]",
        "'fast' is a name of [models]; write what it stands for, as upstream/model",
    ),
    ('route = ["openai/gpt-*"]', "route[0]", "'openai/gpt-*' is a pattern; write the name of one"),
    (
        'route = ["openai/a", "openai/a"]',
        "route[1]",
        "'openai/a' is in this route already; leave it out",
    ),
    ('route = ["openai/a\\nb"]', "route[0]", "is written upstream/model, printable, with no space"),
]


@pytest.mark.parametrize(("table", "key", "problem"), WRONG_ROUTES)
def test_a_wrong_route_says_what_to_write(table: str, key: str, problem: str, file: Path) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        loaded(file, f"[models.fast]\n{table}\n")
    assert caught.value.field == f"models.fast.{key}"
    assert caught.value.problem.startswith(problem), caught.value.problem
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gpt-*", "is a name and no pattern; patterns are for models of [upstreams]"),
        (" fast", "has spaces at its ends; take them out"),
    ],
)
def test_an_alias_is_a_name(name: str, problem: str, file: Path) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        loaded(file, f'[models."{name}"]\nroute = ["openai/x"]')
    assert caught.value.problem == problem


WRONG_GATEWAYS = [
    ("hold_seconds = 0", "hold_seconds: must be a number from 0.001 to 31,536,000, not 0"),
    ('reserve = "some"', "reserve: must be one of expected, strict, not 'some'"),
    (
        'passthrough_keys = "yes"',
        "passthrough_keys: must be one of always, loopback, never, not 'yes'",
    ),
    ("max_wait = 5", "max_wait: is not a setting; did you mean max_wait_seconds?"),
]


@pytest.mark.parametrize(("text", "line"), WRONG_GATEWAYS)
def test_a_wrong_key_of_the_gateway_is_named(text: str, line: str, file: Path) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        loaded(file, f"[gateway]\n{text}")
    assert str(caught.value) == f"gateway.{line} ({file}, line 2)"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("HOLD_SECONDS", "12.5", 12.5),
        ("ENABLED", "false", False),
        ("RESERVE", "strict", Reserve.STRICT),
        ("CLAMP", "true", True),
        ("PASSTHROUGH_KEYS", "never", "never"),
        ("MAX_WAIT_SECONDS", "60", 60.0),
    ],
)
def test_variables_reach_the_gateway(variable: str, value: str, expected: object) -> None:
    found = load_settings(None, {f"HEADGATE_GATEWAY__{variable}": value}, {}).gateway
    assert getattr(found, variable.lower()) == expected


@pytest.mark.parametrize("section", ["upstreams", "models"])
def test_variables_do_not_reach_tables_with_names(section: str) -> None:
    with pytest.raises(InvalidSettingError, match=rf"\[{section}\] is set in the file only"):
        load_settings(None, {f"HEADGATE_{section.upper()}__X": "1"}, {})


def test_a_project_a_budget_and_the_scheduler_say_what_is_held_and_counted(file: Path) -> None:
    text = """
    [scheduler]
    share_unit = "usd"
    [projects.a]
    reserve = "strict"
    [budgets."team:a"]
    limit_usd = 5
    reserve = "strict"
    """
    found = loaded(file, text)
    assert found.scheduler.share_unit == "usd"
    assert found.projects["a"].reserve is Reserve.STRICT
    assert found.projects["default"].reserve is None
    assert found.budgets["team:a"].reserve is Reserve.STRICT


def test_a_rate_limit_of_an_upstream_is_one_of_a_target(file: Path) -> None:
    text = f'{HOUSE}[rate_limits."upstream:house"]\nrequests_per_minute = 5\n'
    found = loaded(file, text)
    assert [(one.kind, one.name) for one in rate_limits(found)] == [("target", "upstream:house")]
    assert warnings_of(found) == []
    with pytest.raises(InvalidSettingError, match="a name with upstream: before it is of calls"):
        loaded(file, '[targets."upstream:house"]\nkind = "pull"')


@pytest.mark.parametrize(
    ("target", "is_used"),
    [
        (CommandTarget(command=("agent",)), True),
        (CommandTarget(command=("agent",), gateway=False), False),
        (HttpTarget(url="http://h/"), False),
        (HttpTarget(url="http://h/", gateway=True), True),
        (CallableTarget(entry_point="a:b"), False),
        (PullTarget(gateway=True), True),
    ],
)
def test_commands_are_given_the_gateway_unless_they_say_otherwise(
    target: Target, is_used: bool
) -> None:
    assert uses_gateway(target) is is_used


def test_keys_and_headers_of_an_upstream_are_read_when_they_are_used() -> None:
    upstream = UpstreamSettings(
        kind="openai", key_env="HOUSE_KEY", headers={"X-Team": "t-{env.TEAM}", "X-B": "b"}
    )
    environ = {"HOUSE_KEY": f" {CANARY}\n", "TEAM": "red"}
    assert read_upstream_key("house", upstream, environ) == CANARY
    assert upstream_headers("house", upstream, environ) == {"X-Team": "t-red", "X-B": "b"}
    for wrong, field, problem in (
        ({}, "key_env", "the variable HOUSE_KEY is not set"),
        ({"HOUSE_KEY": ""}, "key_env", "the variable HOUSE_KEY is empty"),
        ({"HOUSE_KEY": f"{CANARY} x"}, "key_env", "the variable HOUSE_KEY does not hold just a"),
    ):
        with pytest.raises(InvalidSettingError) as caught:
            read_upstream_key("house", upstream, wrong)
        assert caught.value.field == f"upstreams.house.{field}"
        assert caught.value.problem.startswith(problem)
        assert CANARY not in str(caught.value)
    for environ in ({}, {"TEAM": f"{CANARY}\n"}):
        with pytest.raises(InvalidSettingError) as caught:
            upstream_headers("house", upstream, environ)
        assert caught.value.field == "upstreams.house.headers.X-Team"
        assert CANARY not in str(caught.value)


# A reload.

BEFORE = f'{FAST}{HOUSE}base_url = "http://127.0.0.1:9/v1"\n[models.fast]\nroute = ["house/a"]\n'


async def reloaded(service: Running, text: str) -> dict[str, tuple[object, object]]:
    service.path.write_text(text)
    answer = (await service.ask("POST", "/scheduler/reload")).json
    assert answer["needsRestart"] == []
    return {one["key"]: (one["from"], one["to"]) for one in answer["changed"]}


async def test_a_reload_changes_the_gateway_and_tells_whoever_listens(tmp_path: Path) -> None:
    async with running(tmp_path, BEFORE) as service:
        heard: list[Settings] = []
        service.service.config.listen(lambda found, _: heard.append(found))
        changed = await reloaded(
            service,
            f'{FAST}share_unit = "usd"\n[gateway]\nenabled = false\nhold_seconds = 5\n'
            '[upstreams.house]\nkind = "openai"\nbase_url = "http://127.0.0.1:8/v1"\n'
            f'headers = {{ X-A = "{CANARY}" }}\n[upstreams.other]\nkind = "anthropic"\n'
            '[models.fast]\nroute = ["other/b", "house/a"]\n[models.slow]\nroute = ["house/c"]\n',
        )
        other = changed.pop("upstreams.other")
        assert changed == {
            "scheduler.share_unit": ("tokens", "usd"),
            "gateway.enabled": (True, False),
            "gateway.hold_seconds": (240.0, 5.0),
            "upstreams.house.base_url": ("http://127.0.0.1:9/v1", "http://127.0.0.1:8/v1"),
            "upstreams.house.headers": ({}, {"X-A": "***"}),
            "models.fast.route": (["house/a"], ["other/b", "house/a"]),
            "models.slow": (None, {"route": ["house/c"]}),
        }
        assert other[0] is None
        assert [list(found.all_upstreams) for found in heard] == [
            ["house", "anthropic", "openai"],
            ["house", "other", "anthropic", "openai"],
        ]
        assert heard[-1].gateway.hold_seconds == 5.0


async def test_an_upstream_that_left_the_file_is_gone_with_the_reload(tmp_path: Path) -> None:
    async with running(tmp_path, BEFORE) as service:
        changed = await reloaded(service, FAST)
        assert set(changed) == {"upstreams.house", "models.fast"}
        found = service.service.config.settings
        assert (list(found.all_upstreams), found.models) == (["anthropic", "openai"], {})


async def test_a_file_whose_route_leads_nowhere_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, BEFORE) as service:
        service.path.write_text(f'{FAST}[models.fast]\nroute = ["house/a"]\n')
        refused = await service.ask("POST", "/scheduler/reload")
        assert refused.status == 422
        line = refused.problem["error"]
        assert line.startswith("models.fast.route[0]: there is no upstream 'house'; known are ")
        assert list(service.service.config.settings.upstreams) == ["house"]
        assert (await service.get("/settings"))["lastReload"]["problem"] == line


# What people see: `config check`, `config show`, the API of settings, the dashboard.


def test_what_is_configured_is_counted_and_missing_variables_are_told(file: Path) -> None:
    text = f'{HOUSE}key_env = "NO_SUCH_KEY"\nheaders = {{ X-T = "{{env.NO_SUCH_TEAM}}" }}\n'
    file.write_text(f'{text}[models.fast]\nroute = ["house/a"]\n')
    report = check_settings(file, None, is_file_only=False)
    assert (report.upstreams, report.models) == (["house", "anthropic", "openai"], ["fast"])
    assert report.warnings == [
        "upstreams.house: needs NO_SUCH_KEY, NO_SUCH_TEAM in the environment"
    ]


def test_settings_in_effect_have_the_upstreams_that_are_not_written(file: Path) -> None:
    file.write_text(f'{HOUSE}headers = {{ X-A = "{CANARY}", X-B = "{{env.B}}" }}\n')
    shown = settings_in_effect(file)
    assert (shown["upstreams.house.kind"].value, shown["upstreams.house.kind"].origin) == (
        "openai",
        str(file),
    )
    assert shown["upstreams.house.headers"].value == {"X-A": "***", "X-B": "{env.B}"}
    key = shown["upstreams.openai.key_env"]
    assert (key.value, key.origin) == ("OPENAI_API_KEY", "default")
    assert shown["gateway.passthrough_keys"].value == "loopback"
    assert CANARY not in repr(shown)


async def test_the_api_and_the_dashboard_show_addresses_and_no_keys(tmp_path: Path) -> None:
    text = f"{BEFORE.replace('[models', f'headers = {{ X-A = {CANARY!r} }}{chr(10)}[models')}"
    async with running(tmp_path, text) as service:
        api = (await service.ask("GET", "/settings?section=upstreams")).body
        page = (await service.ask("GET", "/ui/settings?section=upstreams&all=yes")).body
        for body in (api, page):
            assert b"http://127.0.0.1:9/v1" in body
            assert b"ANTHROPIC_API_KEY" in body
            assert CANARY.encode() not in body
