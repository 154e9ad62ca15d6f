"""From merged sources to checked settings.

Rule: every refusal names the key as the file writes it. Tables are decoded one by one for that,
because a decoder of the whole does not say under which name it failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from headgate.config.budget_limits import budgets, resolved_rate_limits
from headgate.config.messages import invalid_value, key_path, table_expected
from headgate.config.settings import (
    DEFAULT_PROJECT,
    NAMED_TABLES,
    UPSTREAMS,
    AgentSettings,
    AuthSettings,
    BudgetSettings,
    DashboardSettings,
    GatewaySettings,
    LedgerSettings,
    LogSettings,
    ModelSettings,
    PriceSettings,
    ProjectSettings,
    QuotaSettings,
    RateLimitSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    SlotSettings,
    StoreSettings,
    TelemetrySettings,
    UpstreamSettings,
    WebhookSettings,
    check_keyless,
)
from headgate.config.sources import Merged, Table, merge, parsed, read_text, settings_file
from headgate.config.validation import check, check_names, check_prices
from headgate.errors import InvalidSettingError
from headgate.executors.targets import ECHO, CommandTarget, Target
from headgate.executors.templates import VARIABLE
from headgate.providers.prices import Price
from headgate.redaction import HIDDEN, hidden_address, redacted

ECHO_NAME = "echo"

Section = TypeVar("Section", bound=msgspec.Struct)


def load_settings(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object]
) -> Settings:
    """Read and check all settings: the file, variables over it, options over those.

    Options are named by their key, as in `server.port`; None was not given.
    """
    return decode(merge(path, environ, overrides))


def load_prices(path: Path) -> dict[str, Price]:
    """Read the prices of a settings file, and nothing else of it, for a `PriceList`."""
    text = read_text(path)
    raw = parsed(text, str(path))
    merged = Merged({"prices": {}}, {}, file=str(path), text=text)
    try:
        table = raw.get("prices", {})
        if not isinstance(table, dict):
            raise table_expected(("prices",), table)
        prices: dict[str, PriceSettings] = _many({"prices": table}, "prices", PriceSettings)
        check_prices(prices)
    except InvalidSettingError as error:
        raise merged.located(error) from None
    return {pattern: price.to_price() for pattern, price in prices.items()}


def decode(merged: Merged) -> Settings:
    """Decode merged sources, and check them; an error names the source of its value."""
    try:
        return _checked(merged.tables)
    except InvalidSettingError as error:
        raise merged.located(error) from None


def _checked(tables: Mapping[str, Table]) -> Settings:
    settings = Settings(
        scheduler=_one(tables, "scheduler", SchedulerSettings),
        rate_limits=_many(tables, "rate_limits", RateLimitSettings),
        targets=_many(tables, "targets", Target) or {ECHO_NAME: ECHO},
        projects=_many(tables, "projects", ProjectSettings),
        agents=_many(tables, "agents", AgentSettings),
        budgets=_many(tables, "budgets", BudgetSettings),
        prices=_many(tables, "prices", PriceSettings),
        quota=_one(tables, "quota", QuotaSettings),
        slots=_many(tables, "slots", SlotSettings),
        gateway=_one(tables, "gateway", GatewaySettings),
        upstreams=_upstreams(tables),
        models=_many(tables, "models", ModelSettings),
        server=_one(tables, "server", ServerSettings),
        auth=_one(tables, "auth", AuthSettings),
        webhooks=_one(tables, "webhooks", WebhookSettings),
        store=_one(tables, "store", StoreSettings),
        ledger=_one(tables, "ledger", LedgerSettings),
        log=_one(tables, "log", LogSettings),
        telemetry=_one(tables, "telemetry", TelemetrySettings),
        dashboard=_one(tables, "dashboard", DashboardSettings),
    )
    settings.projects.setdefault(DEFAULT_PROJECT, ProjectSettings())
    check(settings)
    budgets(settings)
    return msgspec.structs.replace(settings, rate_limits=resolved_rate_limits(settings))


def _one(tables: Mapping[str, Table], section: str, kind: type[Section]) -> Section:
    return cast("Section", _decoded(tables[section], kind, (section,)))


def _many(tables: Mapping[str, Table], section: str, kind: Any) -> dict[str, Any]:  # noqa: ANN401
    check_names(section, tables[section])
    return {name: _decoded(table, kind, (section, name)) for name, table in tables[section].items()}


def _upstreams(tables: Mapping[str, Table]) -> dict[str, UpstreamSettings]:
    advice = "name its variable, key_env, or slots"
    for name, table in tables[UPSTREAMS].items():
        if isinstance(table, dict):
            check_keyless((UPSTREAMS, name), table, advice)
    return _many(tables, UPSTREAMS, UpstreamSettings)


def _decoded(table: object, kind: Any, parts: tuple[str, ...]) -> Any:  # noqa: ANN401
    if not isinstance(table, dict):
        raise table_expected(parts, table)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise invalid_value(error, kind, table, parts) from None


# Settings for the eye: every effective value with its origin, and no secret among them.
#
# Rule: what may be a secret is replaced, not shortened. A header or a variable is shown only
# where it consists of a reference such as `Bearer {env.TOKEN}`.

DEFAULT_ORIGIN = "default"

_REFERENCE = re.compile(r"(?:[A-Za-z]+ )?\{(?:env\.\w+|slot\.\w+|key)\}")
_SECRET_ARGUMENT = re.compile(
    r"((?:key|token|secret|password)[\w-]*=).+", re.IGNORECASE | re.DOTALL
)
_URL_KEYS = {"url", "proxy", "alerts_url", "base_url", "quota_url", "request_url"}
_SECRET_KEYS = {"headers", "env"}

Origins = dict[tuple[str, ...], str]


class DisplayedValue(msgspec.Struct, frozen=True, kw_only=True):
    """One effective value, and the file, variable or option that it comes from."""

    value: object
    origin: str


def displayed_settings(settings: Settings, origins: Origins) -> dict[str, DisplayedValue]:
    """Return every effective value by its key, with secrets hidden."""
    return dict(each_displayed(settings, origins))


def each_displayed(settings: Settings, origins: Origins) -> Iterator[tuple[str, DisplayedValue]]:
    """Give every effective value with its key, one by one: there may be thousands."""
    for path, value in _values(settings):
        origin = origins.get(path, DEFAULT_ORIGIN)
        yield key_path(*path), DisplayedValue(value=hidden(path[-1], value), origin=origin)


def _values(settings: Settings) -> Iterator[tuple[tuple[str, ...], object]]:
    # What is there without being written is in effect as well.
    whole = msgspec.structs.replace(settings, upstreams=settings.all_upstreams)
    for section, table in msgspec.to_builtins(whole).items():
        for name, value in table.items():
            if section in NAMED_TABLES:
                yield from (((section, name, key), inner) for key, inner in value.items())
            else:
                yield (section, name), value


def hidden(key: str, value: object) -> object:
    """Return the value of a key without what may be a secret in it."""
    if key in _SECRET_KEYS and isinstance(value, dict):
        return {name: _reference_or_hidden(text) for name, text in value.items()}
    if isinstance(value, dict):
        return {name: hidden(name, inner) for name, inner in value.items()}
    if key in _URL_KEYS and isinstance(value, str):
        return hidden_address(value)
    if key == "wake_body" and isinstance(value, str):
        return redacted(value)
    if key == "command" and isinstance(value, list | tuple):
        return [_SECRET_ARGUMENT.sub(rf"\1{HIDDEN}", str(argument)) for argument in value]
    return value


def variables_of(target: Target) -> set[str]:
    """Return the environment variables that a target refers to."""
    passed = target.pass_env if isinstance(target, CommandTarget) else ()
    return {*_referred_to(target), *passed}


def variables_of_slot(slot: SlotSettings) -> set[str]:
    """Return the environment variables that a slot refers to, that of its key among them."""
    return {*_referred_to(slot), *filter(None, [slot.key_env])}


def variables_of_upstream(upstream: UpstreamSettings) -> set[str]:
    """Return the environment variables that an upstream refers to, that of its key among them."""
    return {*_referred_to(upstream), *filter(None, [upstream.key_env])}


def _referred_to(written: Target | SlotSettings | UpstreamSettings) -> list[str]:
    return VARIABLE.findall(msgspec.json.encode(written).decode())


def _reference_or_hidden(text: object) -> object:
    return text if isinstance(text, str) and _REFERENCE.fullmatch(text) else HIDDEN


# Where the settings of a running service came from, so that they can be read again.


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A file, variables and options; without a file, one that appears in the folder is taken."""

    path: Path | None
    environ: Mapping[str, str] = {}
    options: Mapping[str, object] = {}

    def read(self, *, is_again: bool = False) -> Merged:
        """Read all sources, for a start or again, or raise `InvalidSettingError`."""
        path = self.path or settings_file(None)
        return merge(path, self.environ, self.options, is_again=is_again)


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with the tables that they were decoded from, and where those came from.

    `origins` says so of each value.
    """

    settings: Settings
    tables: dict[str, Table]
    origin: Origin | None = None
    origins: Origins = {}


def load(origin: Origin) -> Loaded:
    """Read and check all settings, and remember how."""
    path = origin.path
    if path is not None:
        # Whoever starts the service may be in a folder that it leaves.
        origin = msgspec.structs.replace(origin, path=path.absolute())
    merged = origin.read()
    return Loaded(
        settings=decode(merged), tables=merged.tables, origin=origin, origins=merged.origins
    )


def loaded_from(settings: Settings) -> Loaded:
    """Return settings that were made by a program, as if a file had written every key."""
    tables: dict[str, Table] = msgspec.to_builtins(settings)
    return Loaded(settings=settings, tables=tables)
