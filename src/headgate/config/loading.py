"""From merged sources to checked settings.

Rule: every refusal names the key as the file writes it. Tables are decoded one by one for that,
because a decoder of the whole does not say under which name it failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from headgate.config.budget_limits import budgets, resolved_rate_limits
from headgate.config.messages import invalid_value, key_path, table_expected, wrong_key
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
from headgate.errors import InvalidSettingError, Problems
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
    return decode(merge(path, environ, overrides, collects=True))


def load_prices(path: Path) -> dict[str, Price]:
    """Read the prices of a settings file, and nothing else of it, for a `PriceList`."""
    text = read_text(path)
    raw = parsed(text, str(path))
    merged = Merged({"prices": {}}, {}, file=str(path), text=text)
    try:
        table = raw.get("prices", {})
        if not isinstance(table, dict):
            raise table_expected(("prices",), table)
        tables = _Tables({"prices": table})
        prices: dict[str, PriceSettings] = tables.many("prices", PriceSettings)
        tables.found.check()
        check_prices(prices)
    except InvalidSettingError as error:
        raise merged.located(error) from None
    return {pattern: price.to_price() for pattern, price in prices.items()}


def decode(merged: Merged) -> Settings:
    """Decode merged sources, and check them; an error names the source of its value.

    It comes with all the others that can be told without a doubt: what depends on a table that
    cannot be read is not judged.
    """
    try:
        return _checked(merged)
    except InvalidSettingError as error:
        raise merged.located(error) from None


def _checked(merged: Merged) -> Settings:
    read = _Tables(merged.tables, merged.problems)
    settings = _settings(read)
    if not read.is_whole:
        read.found.check()
    found = Problems(InvalidSettingError)
    with found.collected():
        check(settings)
    with found.collected():
        budgets(settings)
    with found.collected():
        limits = resolved_rate_limits(settings)
    for error in found.found:
        if not read.has_problem_in_table_of(error.field):
            read.found.add(error)
    read.found.check()
    return msgspec.structs.replace(settings, rate_limits=limits)


def _settings(read: _Tables) -> Settings:
    settings = Settings(
        scheduler=read.one("scheduler", SchedulerSettings),
        rate_limits=read.many("rate_limits", RateLimitSettings),
        targets=read.many("targets", Target) or {ECHO_NAME: ECHO},
        projects=read.many("projects", ProjectSettings),
        agents=read.many("agents", AgentSettings),
        budgets=read.many("budgets", BudgetSettings),
        prices=read.many("prices", PriceSettings),
        quota=read.one("quota", QuotaSettings),
        slots=read.many("slots", SlotSettings),
        gateway=read.one("gateway", GatewaySettings),
        upstreams=read.upstreams(),
        models=read.many("models", ModelSettings),
        server=read.one("server", ServerSettings),
        auth=read.one("auth", AuthSettings),
        webhooks=read.one("webhooks", WebhookSettings),
        store=read.one("store", StoreSettings),
        ledger=read.one("ledger", LedgerSettings),
        log=read.one("log", LogSettings),
        telemetry=read.one("telemetry", TelemetrySettings),
        dashboard=read.one("dashboard", DashboardSettings),
    )
    settings.projects.setdefault(DEFAULT_PROJECT, ProjectSettings())
    return settings


class _Tables:
    """Tables to be decoded, and everything that is found wrong with them."""

    def __init__(
        self, tables: Mapping[str, Table], problems: Iterable[InvalidSettingError] = ()
    ) -> None:
        self._tables = tables
        self.found = Problems(InvalidSettingError)
        for error in problems:
            self.found.add(error)
        self.is_whole = not self.found.found
        self._wrong: list[str] = []

    def one(self, section: str, kind: type[Section]) -> Section:
        """Decode a section."""
        return cast("Section", self._decoded(self._tables[section], kind, (section,)) or kind())

    def many(self, section: str, kind: Any) -> dict[str, Any]:  # noqa: ANN401
        """Decode the tables of a section by their names, without those that cannot be read."""
        with self._spoiling():
            check_names(section, self._tables[section])
        decoded = {
            name: self._decoded(table, kind, (section, name))
            for name, table in self._tables[section].items()
        }
        return {name: value for name, value in decoded.items() if value is not None}

    def upstreams(self) -> dict[str, UpstreamSettings]:
        """Decode the upstreams, none of which has a key in the file itself."""
        advice = "name its variable, key_env, or slots"
        for name, table in self._tables[UPSTREAMS].items():
            if isinstance(table, dict):
                with self._spoiling():
                    check_keyless((UPSTREAMS, name), table, advice)
        return self.many(UPSTREAMS, UpstreamSettings)

    def has_problem_in_table_of(self, field: str) -> bool:
        """Tell whether a key lies in a table that was read without its wrong keys."""
        return any(field == table or field.startswith(f"{table}.") for table in self._wrong)

    def _decoded(self, table: object, kind: Any, parts: tuple[str, ...]) -> Any:  # noqa: ANN401
        """Decode a table; each key that is wrong is told, and left out for the next attempt."""
        if not isinstance(table, dict):
            self.is_whole = False
            return self.found.add(table_expected(parts, table))
        left = dict(table)
        while True:
            try:
                return msgspec.convert(left, kind)
            except msgspec.ValidationError as error:
                key = wrong_key(error)
                # A key that is missing may be the one that was misspelt.
                if key in left or len(left) == len(table):
                    self.found.add(invalid_value(error, kind, left, parts))
                    self._wrong.append(key_path(*parts))
                if key not in left:
                    self.is_whole = False
                    return None
                del left[key]

    @contextmanager
    def _spoiling(self) -> Iterator[None]:
        try:
            yield
        except InvalidSettingError as error:
            self.is_whole = False
            self.found.add(error)


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


def referred_variables(settings: Settings) -> set[str]:
    """Return the environment variables that targets, slots and upstreams refer to."""
    return {
        name
        for names in (
            *map(variables_of, settings.targets.values()),
            *map(variables_of_slot, settings.slots.values()),
            *map(variables_of_upstream, settings.all_upstreams.values()),
        )
        for name in names
    }


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
        collects = not is_again
        return merge(path, self.environ, self.options, is_again=is_again, collects=collects)


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
