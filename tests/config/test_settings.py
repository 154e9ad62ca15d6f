"""Settings: what is wrong is one line that names the key, what is right means what it says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.config import (
    AuthSettings,
    GatewaySettings,
    LedgerSettings,
    ProjectSettings,
    QuotaSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    StoreSettings,
    WebhookSettings,
    budgets,
    load_settings,
    rate_limits,
    settings_file,
    warnings_of,
)
from headgate.config.loading import decode, displayed_settings, hidden, variables_of
from headgate.config.messages import key_path
from headgate.config.settings import NAMED_TABLES, SECTIONS, TABLES
from headgate.config.sources import MAX_FILE_BYTES, merge, merge_tables, merge_text
from headgate.core.budgets.ledger import Limit
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.budgets.windows import Window, WindowKind, parse_window
from headgate.core.load import OPTIMIZE_FOR
from headgate.core.money import MicroUsd, Tokens
from headgate.core.rate_limits import RateLimit
from headgate.core.snapshot import Agent, LanePolicy, Project
from headgate.errors import InvalidSettingError
from headgate.executors.targets import (
    ECHO,
    CommandTarget,
    HttpTarget,
)

DOCS = Path(__file__).parents[2] / "docs"

# The shape of the file as it was first agreed on, with its defaults.
AGREED = """
[scheduler]
enabled = true
strategy = "fair-fifo"
max_queue_size = 1000
queue_share = 8
max_per_agent = 100
max_inflight = 20
max_per_agent_inflight = 10
worker_count = 20
task_retention_seconds = 604800
max_ended_tasks = 1000000
attempt_timeout_seconds = 3600
tick_seconds = 5
usage_window_hours = 24
global_budget = 0

[rate_limits.claude]
tokens_per_minute = 400000

[targets.browser]
kind = "http"
url = "http://127.0.0.1:9867/tabs/{tabId}/action"
headers = { Authorization = "Bearer {env.TAB_TOKEN}" }
default = true

[projects.search]
credit_weight = 2.0
max_concurrent_agents = 4
budget_limit = 1000000

[budgets."session:eval"]
limit_usd = "50.00"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "headgate.toml"


def loaded(
    file: Path,
    text: str = "",
    environ: Mapping[str, str] | None = None,
    **overrides: object,
) -> Settings:
    file.write_text(text)
    return load_settings(file, environ or {}, overrides)


def test_without_any_source_everything_has_its_default() -> None:
    assert load_settings(None, {}, {}) == Settings(
        targets={"echo": ECHO}, projects={"default": ProjectSettings()}
    )


def test_the_agreed_file_has_the_defaults_of_the_scheduler(file: Path) -> None:
    assert loaded(file, AGREED).scheduler == SchedulerSettings()


def test_the_agreed_file_makes_a_project_two_budgets_and_a_rate_limit(file: Path) -> None:
    found = loaded(file, AGREED)
    assert found.default_target == "browser"
    assert found.core_projects() == (
        Project(id="search", credit_weight=2.0, max_concurrent_agents=4, budget_limit=1_000_000),
        Project(id="default", max_concurrent_agents=None),
    )
    assert budgets(found) == {
        Scope("session:eval"): Limit(limit_micro_usd=MicroUsd(50_000_000)),
        Scope("project:search"): Limit(
            limit_tokens=Tokens(1_000_000), window=Window(kind=WindowKind.ROLLING, hours=24)
        ),
    }
    assert rate_limits(found) == (
        RateLimit(kind="agent_type", name="claude", unit="tokens", most=400_000, window_seconds=60),
    )


DOLLARS = 'budgets."a:b".limit_usd: must be dollars from 0 to 1,000,000,000'
REFUSED: list[tuple[str, str]] = [
    # Keys that nothing reads.
    (
        "[scheduler]\nmax_inflght = 1",
        "scheduler.max_inflght: is not a setting; did you mean max_inflight?",
    ),
    ("[schedular]", "schedular: is not a setting; did you mean scheduler?"),
    (
        "[projects.a]\ncredit_wieght = 3",
        "projects.a.credit_wieght: is not a setting; did you mean credit_weight?",
    ),
    (
        '[projects."a.b"]\nwidth = 3',
        'projects."a.b".width: is not a setting; known are budget_limit,',
    ),
    (
        '[server]\n"a - at b" = 1',
        'server."a - at b": is not a setting; known are advertise, host, port',
    ),
    ('"[\\n" = 1', '"[\\n": is not a setting; known are agents,'),
    ("[server]\nzzz = 1", "server.zzz: is not a setting; known are advertise, host, port"),
    (
        '[targets.a]\nkind = "http"\nurll = "x"',
        "targets.a.urll: is not a setting; did you mean url?",
    ),
    (
        '[targets.a]\nkind = "http"\nresolver = { ur = "x" }',
        "targets.a.resolver.ur: is not a setting; did you mean url?",
    ),
    # Tables and plain values.
    ("scheduler = 3", "scheduler: must be a table, not 3"),
    ("[projects]\na = 3", "projects.a: must be a table, not 3"),
    ("[[projects]]", "projects: must be a table, not a list"),
    ("[slots.work]", "slots: is a list of tables; begin each with [[slots]]"),
    # Types and ranges.
    (
        "[scheduler]\nqueue_share = 0.5",
        "scheduler.queue_share: must be a number from 1 to 1,000,000, not 0.5",
    ),
    (
        "[scheduler]\nmax_inflight = -1",
        "scheduler.max_inflight: must be a whole number from 1 to 1,000,000, not -1",
    ),
    (
        '[scheduler]\nmax_inflight = "5"',
        "scheduler.max_inflight: must be a whole number from 1 to 1,000,000, not '5'",
    ),
    (
        "[scheduler]\nmax_inflight = true",
        "scheduler.max_inflight: must be a whole number from 1 to 1,000,000, not true",
    ),
    (
        "[scheduler]\nmax_inflight = 1.5",
        "scheduler.max_inflight: must be a whole number from 1 to 1,000,000, not 1.5",
    ),
    (
        f"[scheduler]\nmax_inflight = 0x{'f' * 9_000}",
        "scheduler.max_inflight: must be a whole number from 1 to 1,000,000, not a num",
    ),
    (
        "[scheduler]\ntick_seconds = inf",
        "scheduler.tick_seconds: must be a number from 0.01 to 3,600, not inf",
    ),
    (
        "[scheduler]\ntask_retention_seconds = nan",
        "scheduler.task_retention_seconds: must be a number from 0.001 to 31,536,000, not nan",
    ),
    (
        "[scheduler]\ntick_seconds = 1979-05-27",
        "scheduler.tick_seconds: must be a number from 0.01 to 3,600, not a date",
    ),
    ("[scheduler]\nenabled = 1", "scheduler.enabled: must be true or false, not 1"),
    (
        '[scheduler]\nstrategy = "lod"',
        "scheduler.strategy: must be one of fair-fifo, load, not 'lod'",
    ),
    (
        "[scheduler]\nalpha = 0.7",
        "scheduler.alpha: must be a number from 0 to 0.5, not 0.7; allow_unsafe_alpha = true all",
    ),
    (
        "[scheduler]\nalpha = 1.01\nallow_unsafe_alpha = true",
        "scheduler.alpha: must be a number from 0 to 1, not 1.01",
    ),
    ("[scheduler]\nalpha = 1.01", "scheduler.alpha: must be a number from 0 to 1, not 1.01"),
    (
        "[scheduler]\nauto_tune = true\nallow_unsafe_alpha = true",
        "scheduler.auto_tune: keeps alpha at most 0.5; leave out allow_unsafe_alpha",
    ),
    ("[server]\nport = 70000", "server.port: must be a whole number from 0 to 65,535, not 70000"),
    ('[server]\nhost = ""', "server.host: must be a string of 1 to 2,000 characters"),
    (
        "[agents.a]\ncapacity = 0",
        "agents.a.capacity: must be a whole number from 1 to 1,000,000, not 0",
    ),
    ("[projects.a]\nbudget_limit = 0", "projects.a.budget_limit: must be a whole number from 1 to"),
    (
        '[projects.a]\nstatus = "asleep"',
        "projects.a.status: must be one of active, paused, draining, archived, not 'asleep'",
    ),
    (
        "[projects.a]\ncredit_weight = 1e-9",
        "projects.a.credit_weight: must be 0, or 1e-06 or more, not 1e-09",
    ),
    # Keys that contradict each other.
    (
        '[scheduler]\nalpha = 0.1\noptimize_for = "latency"',
        "scheduler.alpha: give either alpha or optimize_for, not both",
    ),
    (
        "[scheduler]\nretry_base_seconds = 70",
        "scheduler.retry_max_seconds: must be at least retry_base_seconds (70), not 60",
    ),
    # Names.
    ('[projects."a b"]', 'projects."a b": a project\'s name is made of letters'),
    ('[agents.""]', 'agents."": a name has 1 to 128 characters'),
    ('[agents."a\\u001b"]', 'agents."a\\u001b": a name has 1 to 128 characters'),
    # Budgets.
    ("[budgets.a]\nlimit_usd = 1", "budgets.a: 'a' is a name without its kind; write"),
    ('[budgets."a:b"]', 'budgets."a:b": limits nothing; write limit_usd, limit_tokens or both'),
    ('[budgets."a:b"]\nlimit_usd = "x"', DOLLARS + ", not 'x'"),
    (
        '[budgets."a:b"]\nlimit_usd = []',
        'budgets."a:b".limit_usd: must be a string or a number, not a list',
    ),
    ('[budgets."a:b"]\nlimit_usd = 1e12', DOLLARS + ", not 1000000000000.0"),
    (
        '[budgets."a:b"]\nlimit_usd = 1\nwindow = "dya"',
        "budgets.\"a:b\".window: 'dya' is no window",
    ),
    (
        '[budgets."a:b"]\nlimit_usd = 1\nwindow = "day@Europe/Nowhere"',
        "budgets.\"a:b\".window: 'Europe/Nowhere' is not a zone",
    ),
    (
        '[budgets."A:b"]\nlimit_usd = 1\n[budgets."a:b"]\nlimit_usd = 1',
        'budgets."a:b": budgets."A:b" sets the budget of a:b too; keep one of them',
    ),
    (
        '[projects.a]\nbudget_limit = 5\n[budgets."project:a"]\nlimit_tokens = 5',
        'projects.a.budget_limit: budgets."project:a" sets the budget of project:a too',
    ),
    (
        "[scheduler]\nglobal_budget = 4\n[budgets.root]\nlimit_usd = 5",
        "scheduler.global_budget: budgets.root sets the budget of root too",
    ),
    (
        '[targets.t]\nkind = "pull"\nestimate_usd = "-1"',
        "targets.t.estimate_usd: must be dollars from 0 to 1,000,000, not '-1'",
    ),
    # Targets.
    (
        '[targets.a]\nkind = "ftp"',
        "targets.a.kind: must be one of http, command, callable, pull, ",
    ),
    ('[targets.a]\nurl = "x"', "targets.a.kind: is missing; write it"),
    ('[targets.a]\nkind = "command"', "targets.a.command: is missing; write it"),
    (
        '[targets.a]\nkind = "command"\ncommand = []',
        "targets.a.command: must be a list that is not empty",
    ),
    (
        '[targets.a]\nkind = "callable"\nentry_point = ""',
        "targets.a.entry_point: must be a string that is not empty",
    ),
    ('[targets.a]\nkind = "http"\nheaders = { a = 1 }', "targets.a.headers[...]: must be a string"),
    (
        '[targets.a]\nkind = "http"\ndefault = true\n[targets.b]\nkind = "http"\ndefault = true',
        "targets.b.default: a is the default already; mark one target",
    ),
    # Rate limits.
    ("[rate_limits.x]", "rate_limits.x: limits nothing; write tokens_per_… or requests_per_…"),
    (
        "[rate_limits.x]\ntokens_per_minute = 0",
        "rate_limits.x.tokens_per_minute: must be a whole number from 1",
    ),
    (
        '[rate_limits.x]\nkind = "slot"\ntokens_per_day = 1',
        "rate_limits.x.kind: no slot has the name x; correct one of the two",
    ),
    (
        '[targets.x]\nkind = "http"\nslot = "x"\n[rate_limits.x]\ntokens_per_day = 1',
        'rate_limits.x: is the name of a target and of a slot; write kind = "target" or "slot"',
    ),
    # URLs; no more than the scheme is repeated.
    (
        '[store]\nurl = "mysql://u:p@h/d"',
        "store.url: 'mysql' is not a scheme for it; write one as sqlite:///",
    ),
    ('[server]\nadvertise = "10.0.0.5:7420"', "server.advertise: is the scheme, the host"),
    ('[server]\nadvertise = "http://h:1/x?y"', "server.advertise: is the scheme, the host"),
    ('[store]\nurl = "hunter2"', "store.url: has no scheme; write one as sqlite:///"),
    ('[store]\nurl = "sqlite:headgate.db"', "store.url: a path follows sqlite:///"),
    ('[store]\nurl = "memory:x"', "store.url: write one as sqlite:///"),
    ('[store]\nurl = "redis://h"', "store.url: 'redis' is not a scheme for it"),
    (
        '[store]\ndomain = "evals"',
        "store.domain: is a part of a PostgreSQL database; set store.url",
    ),
    ('[store]\ndomain = "Evals"', "store.domain: has up to 30 small letters, digits and _"),
]


@pytest.mark.parametrize(("text", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_what_is_wrong_in_a_file_is_one_line_that_names_the_key(
    text: str, line: str, file: Path
) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        loaded(file, text)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[budget]", 1),
        ('\n[budget."project:a"]\nlimit_usd = 1', 2),
        ("[server]\n\n[[budget]]\nlimit_usd = 1", 3),
        ('\n\n\nbudget."project:a".limit_usd = 1', 4),
    ],
)
def test_a_section_that_is_not_known_is_named_with_its_line(
    text: str, line: int, file: Path
) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        loaded(file, text)
    wrong = "budget: is not a setting; did you mean budgets?"
    assert str(caught.value) == f"{wrong} ({file}, line {line})"


NOT_TOML: list[tuple[bytes, str]] = [
    (b"a = 1\n=", ", line 2, column 1: Invalid statement"),
    (b'a = 1\nb = "', ", line 2, column 6: Unterminated string"),
    (b"a = 1\na = 2\n", ", line 2, column 6: Cannot overwrite a value"),
    (b"a = 1\nb = '\xff'", ", line 2, column 6: is not UTF-8"),
    (b"a = " + b"[" * 50_000, ": is nested too deeply"),
    (b"a = " + b"1" * 5_000, ": has a number with too many digits"),
    (b"#" * (MAX_FILE_BYTES + 1), ": has more than 4,194,304 bytes; it is not a settings file"),
]


@pytest.mark.parametrize(("content", "line"), NOT_TOML, ids=[line for _, line in NOT_TOML])
def test_a_file_that_is_not_toml_is_one_line_with_the_place(
    content: bytes, line: str, file: Path
) -> None:
    file.write_bytes(content)
    with pytest.raises(InvalidSettingError) as caught:
        load_settings(file, {}, {})
    assert str(caught.value) == f"{file}{line}"


def test_a_file_that_cannot_be_read_is_one_line(file: Path) -> None:
    for path, why in ((file, "No such file or directory"), (file.parent, "Is a directory")):
        with pytest.raises(InvalidSettingError) as caught:
            load_settings(path, {}, {})
        assert str(caught.value) == f"{path}: cannot be read: {why}; name a file with --config"


def test_a_byte_order_mark_is_ignored(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf[server]\nport = 1\n")
    assert load_settings(file, {}, {}).server.port == 1


WRONG_VARIABLES: list[tuple[str, str, str]] = [
    (
        "HEADGATE_SCHEDULER__MAX_INFLIGHT",
        "many",
        "must be a whole number from 1 to 1,000,000, not 'many'",
    ),
    ("HEADGATE_SCHEDULER__MAX_INFLGHT", "5", "is not a setting; did you mean max_inflight?"),
    ("HEADGATE_SCHEDULER__ENABLED", "no", "must be true or false, not 'no'"),
    ("HEADGATE_SCHEDULER__STRATEGY", "lod", "must be one of fair-fifo, load, not 'lod'"),
    ("HEADGATE_SCHEDULER__", "5", "is not a setting; headgate config example shows all of them"),
    ("HEADGATE_SERVER__PORT", "80000", "must be a whole number from 0 to 65,535, not '80000'"),
    ("HEADGATE_STORE__URL", "", "must be a string of 1 to 2,000 characters"),
    (
        "HEADGATE_X__Y",
        "1",
        f"is not a setting; known are {', '.join(sorted(TABLES))}",
    ),
    (
        "HEADGATE_PROJECTS__A",
        "1",
        "[projects] is set in the file only; write it into headgate.toml",
    ),
]


@pytest.mark.parametrize(("variable", "value", "problem"), WRONG_VARIABLES)
def test_a_wrong_variable_is_named(variable: str, value: str, problem: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        load_settings(None, {variable: value}, {})
    assert str(caught.value) == f"{variable}: {problem}"


def test_variables_without_two_underscores_are_no_settings() -> None:
    environ = {"HEADGATE_DEBUG": "1", "HEADGATE_BUDGET_URL": "x", "OTHER_SERVER__PORT": "x"}
    assert load_settings(None, environ, {}) == load_settings(None, {}, {})


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("MAX_INFLIGHT", "5", 5),
        ("TICK_SECONDS", "0.5", 0.5),
        ("ENABLED", "false", False),
        ("STRATEGY", "load", LanePolicy.HIGHEST_LOAD),
        ("ALPHA", "0", 0.0),
        ("ESTIMATE_QUANTILE", "0.9", 0.9),
    ],
)
def test_a_variable_is_read_as_the_type_of_its_key(
    variable: str, value: str, expected: object
) -> None:
    scheduler = load_settings(None, {f"HEADGATE_SCHEDULER__{variable}": value}, {}).scheduler
    assert getattr(scheduler, variable.lower()) == expected


def test_variables_go_over_the_file_and_options_over_both(file: Path) -> None:
    file.write_text("[server]\nhost = 'a'\nport = 1\n[scheduler]\nmax_inflight = 7")
    environ = {"HEADGATE_SERVER__PORT": "2", "HEADGATE_STORE__URL": "memory:"}
    options = {"store.url": "sqlite:///x.db", "server.host": None}
    found = load_settings(file, environ, options)
    assert (found.server.host, found.server.port) == ("a", 2)
    assert (found.scheduler.max_inflight, found.store.url) == (7, "sqlite:///x.db")


def test_an_option_that_is_no_setting_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match=r"server\.prt: .* did you mean port"):
        load_settings(None, {}, {"server.prt": 5})


def test_a_zero_within_the_range_is_taken(file: Path) -> None:
    found = loaded(file, "[scheduler]\nalpha = 0\ndrain_seconds = 0\nenabled = false").scheduler
    assert (found.alpha, found.drain_seconds, found.enabled) == (0.0, 0.0, False)


@pytest.mark.parametrize(
    ("text", "alpha"),
    [
        ("", 0.25),
        ("alpha = 0.1", 0.1),
        ("alpha = 1.0\nallow_unsafe_alpha = true", 1.0),
        ("alpha = 0.51\nallow_unsafe_alpha = true", 0.51),
        *((f'optimize_for = "{n}"', a) for n, a in OPTIMIZE_FOR.items()),
    ],
)
def test_alpha_is_given_by_number_or_by_name(text: str, alpha: float, file: Path) -> None:
    assert loaded(file, f"[scheduler]\n{text}").scheduler.resolved_alpha == alpha


def test_the_scheduler_hands_out_the_types_of_the_core() -> None:
    scheduler = SchedulerSettings(
        max_queue_size=3,
        max_per_agent=2,
        retry_base_seconds=2.0,
        retry_max_seconds=9.0,
    )
    assert (scheduler.queue_limits.max_queue, scheduler.queue_limits.max_per_agent) == (3, 2)
    backoff = scheduler.retry_policy.backoff
    assert (backoff.base_seconds, backoff.max_seconds) == (2.0, 9.0)


def test_a_project_has_no_cap_unless_one_is_set(file: Path) -> None:
    text = "[projects.a]\ncredit_weight = 2\n[projects.b]\nmax_concurrent_agents = 3"
    found = loaded(file, f"{text}\n[projects.default]\ncredit_weight = 3")
    assert [(one.id, one.max_concurrent_agents) for one in found.core_projects()] == [
        ("a", None),
        ("b", 3),
        ("default", None),
    ]


def test_an_agent_without_a_capacity_has_that_of_undeclared_ones(file: Path) -> None:
    text = "[scheduler]\nmax_per_agent_inflight = 4\n[agents.a]\n[agents.b]\ncapacity = 9\ntype='t'"
    assert loaded(file, text).core_agents() == (
        Agent(id="a", capacity=4),
        Agent(id="b", agent_type="t", capacity=9),
    )


@pytest.mark.parametrize(
    ("text", "default"),
    [
        ("", "echo"),
        ('[targets.a]\nkind = "http"', "a"),
        ('[targets.a]\nkind = "http"\n[targets.b]\nkind = "http"', None),
        ('[targets.a]\nkind = "http"\n[targets.b]\nkind = "http"\ndefault = true', "b"),
    ],
)
def test_the_default_target_is_the_marked_one_or_the_only_one(
    text: str, default: str | None, file: Path
) -> None:
    assert loaded(file, text).default_target == default


def test_budgets_have_their_windows_and_the_global_one_is_the_root(file: Path) -> None:
    text = """
    [scheduler]
    global_budget = 900
    usage_window_hours = 6
    [budgets."team:a"]
    limit_usd = 0.07
    limit_tokens = 0
    window = "week@Europe/Berlin"
    """
    assert budgets(loaded(file, text)) == {
        Scope("team:a"): Limit(
            limit_micro_usd=MicroUsd(70_000),
            limit_tokens=Tokens(0),
            window=parse_window("week@Europe/Berlin"),
        ),
        ROOT: Limit(limit_tokens=Tokens(900), window=parse_window("rolling:6h")),
    }


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('[agents.a]\ntype = "x"', "agent_type"),
        ('[targets.x]\nkind = "http"', "target"),
        ('[targets.a]\nkind = "http"\nslot = "x"', "slot"),
        ('[[slots]]\nname = "x"\nprovider = "zai"\nkey_env = "K"', "slot"),
        ("", "agent_type"),
    ],
)
def test_a_rate_limit_is_on_what_has_its_name(text: str, kind: str, file: Path) -> None:
    found = loaded(file, f"{text}\n[rate_limits.x]\nrequests_per_hour = 5\ntokens_per_day = 7")
    assert [(one.kind, one.unit, one.most, one.window_seconds) for one in rate_limits(found)] == [
        (kind, "requests", 5, 3_600),
        (kind, "tokens", 7, 86_400),
    ]
    assert bool(warnings_of(found)) == (text == "")


def test_a_budget_of_a_mistyped_kind_is_warned_of(file: Path) -> None:
    found = loaded(file, "[budgets.'sesion:a']\nlimit_usd = '5'")
    problem = "Headgate itself charges no scope of kind 'sesion'; did you mean session:a?"
    assert warnings_of(found) == [f'budgets."sesion:a": {problem}']


def test_the_file_in_the_working_directory_is_taken_if_there_is_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert settings_file(None) is None
    file.touch()
    assert settings_file(None) == Path("headgate.toml")
    assert settings_file(Path("other.toml")) == Path("other.toml")


def test_every_value_is_shown_with_its_origin(file: Path) -> None:
    file.write_text('[projects."a.b"]\ncredit_weight = 2')
    merged = merge(file, {"HEADGATE_SERVER__PORT": "1"}, {"server.host": "::1"})
    shown = displayed_settings(decode(merged), merged.origins)
    origins = {key: one.origin for key, one in shown.items() if one.origin != "default"}
    assert origins == {
        'projects."a.b".credit_weight': str(file),
        "server.port": "HEADGATE_SERVER__PORT",
        "server.host": "option",
    }
    keys = {f"scheduler.{name}" for name in SchedulerSettings.__struct_fields__}
    assert keys <= set(shown)


SECRETS: list[tuple[str, object, object]] = [
    ("url", "postgresql://u:hunter2@h/d", "postgresql://***@h/d"),
    ("url", "postgresql://u:hun/ter2@h/d", "postgresql://***@h/d"),
    ("url", "postgresql://h/d?user=u&password=hunter2", "postgresql://h/d?user=***&password=***"),
    ("url", "http://h/{tabId}?k={env.K}&token=hunter2", "http://h/{tabId}?k={env.K}&token=***"),
    ("url", "sqlite:////var/lib/headgate.db", "sqlite:////var/lib/headgate.db"),
    ("proxy", "http://u:hunter2@h", "http://***@h"),
    ("headers", {"A": "Bearer hunter2"}, {"A": "***"}),
    ("headers", {"A": "Bearer {env.TOKEN}"}, {"A": "Bearer {env.TOKEN}"}),
    ("headers", {"A": "Bearer {slot.key}", "B": "{key}"}, {"A": "Bearer {slot.key}", "B": "{key}"}),
    ("headers", {"A": "hunter2{env.TOKEN}"}, {"A": "***"}),
    ("quota_url", "https://h/q?token=hunter2", "https://h/q?token=***"),
    ("env", {"KEY": "hunter2", "B": "{env.B}"}, {"KEY": "***", "B": "{env.B}"}),
    ("command", ["run", "--api-key=hunter2", "-v"], ["run", "--api-key=***", "-v"]),
    (
        "resolver",
        {"url": "http://u:p@h", "headers": {"A": "x"}},
        {"url": "http://***@h", "headers": {"A": "***"}},
    ),
    ("max_inflight", 5, 5),
]


@pytest.mark.parametrize(("key", "value", "shown"), SECRETS)
def test_secrets_are_hidden_and_references_are_not(key: str, value: object, shown: object) -> None:
    assert hidden(key, value) == shown


def test_the_variables_of_a_target_are_found_wherever_it_names_them() -> None:
    http = HttpTarget(url="http://{env.HOST}/", headers={"A": "Bearer {env.TOKEN}"})
    command = CommandTarget(command=("run",), env={"A": "{env.B}"}, pass_env=("C",))
    assert variables_of(http) == {"HOST", "TOKEN"}
    assert variables_of(command) == {"B", "C"}


KEYS = [name for kind in SECTIONS.values() for name in kind.__struct_fields__]
WORDS = st.sampled_from([*TABLES, *NAMED_TABLES, *KEYS, "http", "command", "kind", "default"])
PLAIN: st.SearchStrategy[object] = st.one_of(
    WORDS,
    st.text(max_size=8),
    st.integers(),
    st.integers(min_value=10**17, max_value=10**40),
    st.floats(),
    st.booleans(),
    st.just(date(1979, 5, 27)),
)
JUNK = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(WORDS, st.text(max_size=8)), inner, max_size=4),
    ),
    max_leaves=12,
)
JUNK_SECTIONS = st.dictionaries(
    st.sampled_from([*TABLES, *NAMED_TABLES]),
    st.one_of(
        st.dictionaries(st.one_of(WORDS, st.text(max_size=8)), JUNK, max_size=4),
        st.dictionaries(st.text(max_size=8), st.dictionaries(WORDS, JUNK, max_size=4), max_size=3),
        JUNK,
    ),
    max_size=4,
)


def outcome(work: Callable[[], Settings]) -> Settings | InvalidSettingError:
    try:
        return work()
    except InvalidSettingError as error:
        return error


@given(raw=st.one_of(JUNK_SECTIONS, st.dictionaries(st.text(max_size=8), JUNK, max_size=3)))
@settings(deadline=None, max_examples=300)
def test_junk_is_refused_with_a_key_or_makes_settings(raw: dict[str, Any]) -> None:
    found = outcome(lambda: decode(merge_tables(raw, {}, {}, origin="junk")))
    if isinstance(found, Settings):
        assert len(rate_limits(found)) >= len(found.rate_limits)
        assert len(budgets(found)) >= len(found.budgets)
    else:
        assert found.field.startswith(tuple(key_path(key) for key in raw))
        assert "\n" not in str(found)


@given(content=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
@settings(deadline=None, max_examples=100)
def test_any_file_is_refused_or_read(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("junk") / "headgate.toml"
    path.write_bytes(content)
    assert "\n" not in str(outcome(lambda: load_settings(path, {}, {})))


@given(
    section=st.sampled_from(["SCHEDULER", "SERVER", "STORE", "PROJECTS", "X", ""]),
    key=st.one_of(st.sampled_from([key.upper() for key in KEYS]), st.text(max_size=8)),
    value=st.one_of(st.text(max_size=8), st.integers().map(str), st.floats().map(str)),
)
@settings(deadline=None, max_examples=200)
def test_any_variable_is_refused_or_read(section: str, key: str, value: str) -> None:
    variable = f"HEADGATE_{section}__{key}"
    found = outcome(lambda: load_settings(None, {variable: value}, {}))
    if isinstance(found, Settings):
        assert math.isfinite(found.scheduler.tick_seconds)
    else:
        assert found.field in {variable, f"{section}.{key}".lower()}


def test_a_key_is_written_as_the_file_would() -> None:
    assert key_path("projects", "a b", "name") == 'projects."a b".name'
    assert key_path("targets", "x", "headers", "[...]") == "targets.x.headers[...]"


def test_the_example_in_the_documentation_decodes_and_names_every_key_of_the_service() -> None:
    path = DOCS / "examples/headgate.toml"
    found = load_settings(path, {}, {})
    assert (found.scheduler, found.server, found.auth, found.store, found.ledger) == (
        SchedulerSettings(),
        ServerSettings(),
        AuthSettings(),
        StoreSettings(),
        LedgerSettings(),
    )
    assert (found.webhooks, found.quota, found.gateway) == (
        WebhookSettings(),
        QuotaSettings(),
        GatewaySettings(),
    )
    assert warnings_of(found) == []
    text = path.read_text()
    for kind in TABLES.values():
        assert [name for name in kind.__struct_fields__ if f"{name} = " not in text] == []


def test_what_is_commented_out_of_the_example_is_right_too() -> None:
    text = (DOCS / "examples/headgate.toml").read_text()
    sections = re.findall(r"(?:^# (?!#).*\n)*?(^# \[.*\n(?:^#.*\n)+)", text, re.MULTILINE)
    assert len(sections) == 3
    for section in sections:
        text = text.replace(section, re.sub(r"^# ", "", section, flags=re.MULTILINE))
    found = decode(merge_text(text, "example", {}, {}))
    assert set(found.targets) == {"review", "browser"}
    assert [slot.wake_modes for slot in found.slots.values()] == [()]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("allowed_hosts", "https://headgate.example"),
        ("allowed_hosts", "a b"),
        ("allowed_hosts", "host:port"),
        ("allowed_origins", "headgate.example"),
        ("allowed_origins", "https://headgate.example/"),
        ("allowed_origins", "*"),
    ],
)
def test_a_host_or_an_origin_that_no_header_can_have_is_refused(key: str, value: str) -> None:
    raw: dict[str, object] = {"auth": {key: [value]}}
    with pytest.raises(InvalidSettingError) as caught:
        decode(merge_tables(raw, {}, {}, origin="file"))
    assert caught.value.field == f"auth.{key}[0]"


def test_a_list_in_a_variable_is_written_with_commas() -> None:
    found = load_settings(None, {"HEADGATE_AUTH__ALLOWED_HOSTS": "a.example, [::1]:80,"}, {})
    assert found.auth.allowed_hosts == ("a.example", "[::1]:80")
    assert not found.auth.required
