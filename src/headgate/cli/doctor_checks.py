"""The checks of `headgate doctor`, each a function that looks and changes nothing.

Rule: a check never raises. What it cannot find out it says, with what a person can do about it.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import httpx2
import msgspec

from headgate.app import auth_rules, held_file, is_shared, sqlite_file
from headgate.budgets.connect import connect_budget
from headgate.cli.config_report import has_no_upstream_key
from headgate.cli.connection import (
    TOKEN_FILE,
    Connection,
    connect,
    data_directory,
    settings_of,
    to_ask,
)
from headgate.client.requests import URL_VARIABLE
from headgate.config import (
    Settings,
    SlotSettings,
    UpstreamSettings,
    settings_file,
    warnings_of,
)
from headgate.config.loading import variables_of, variables_of_slot, variables_of_upstream
from headgate.config.messages import key_path
from headgate.config.overrides import REPLACED_SECONDS, read_replaced_budgets
from headgate.config.settings import OPTIONAL_KEYS
from headgate.config.slot_keys import SlotKeys, read_key, read_upstream_key, upstream_headers
from headgate.core.budgets.scopes import ROOT
from headgate.core.dispatch_state import TargetEstimate
from headgate.core.fair_share import hour_of
from headgate.core.money import format_usd
from headgate.core.retention import in_mebibytes
from headgate.errors import CallerError, HeadgateError, InvalidSettingError
from headgate.executors.build import build_executor
from headgate.executors.confinement import command_user, confinement_of_this_machine, launcher
from headgate.executors.executor import GATEWAY_VARIABLES, Executor, RemoteExecutor
from headgate.executors.targets import (
    CallableTarget,
    CommandTarget,
    HttpTarget,
    RayTarget,
    Target,
    target_estimates,
    uses_gateway,
)
from headgate.extras import naming_extras
from headgate.providers.http_client import HttpClient
from headgate.providers.prices import PriceList, price_advice
from headgate.storage.data_lock import (
    Holder,
    holder_of,
    is_held,
    service_address,
    store_folders,
)
from headgate.storage.ledger import unaccepted
from headgate.storage.migrations import schema_version
from headgate.storage.sql_store import PARTS
from headgate.storage.transaction import Database, Transaction
from headgate.storage.usage import (
    SILENT_SECONDS,
    UNPRICED_SECONDS,
    silent_kinds,
    unpriced,
)

Verdict = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a doctor's report; what is ok needs no advice."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    """Find that something is as it should be."""
    return Finding(check=check, verdict="ok", found=found)


def warn(check: str, found: str, advice: str) -> Finding:
    """Find something that works, and may not be meant so."""
    return Finding(check=check, verdict="warn", found=found, advice=advice)


def fail(check: str, found: str, advice: str) -> Finding:
    """Find something that keeps the service from its work."""
    return Finding(check=check, verdict="fail", found=found, advice=advice)


# Where variables are looked up: what a running service has counts, and not what this shell has.


class Environment(NamedTuple):
    """The variables of this shell, and whether the running service has those of its settings."""

    shell: Mapping[str, str]
    service: Mapping[str, bool] | None = None
    problems: Mapping[str, str] = MappingProxyType({})

    def missing(self, names: Iterable[str]) -> str:
        """Name the variables that are not set, and where; empty if all are."""
        there = self.service or {}
        found = sorted(name for name in names if not there.get(name, name in self.shell))
        where = "in this shell" if self.service is None else "where the service runs"
        return f"{', '.join(found)} is not set {where}" if found else ""

    def wrong(self, names: Iterable[str]) -> str:
        """Say what the service finds wrong with variables; empty if nothing."""
        return "; ".join(self.problems[name] for name in sorted(names) if name in self.problems)

    def unseen(self, names: Iterable[str]) -> str:
        """Name the variables that only the service has, so that nobody can look at them here."""
        there = self.service or {}
        found = sorted(name for name in names if there.get(name) and name not in self.shell)
        return f"{', '.join(found)} is set where the service runs" if found else ""

    @property
    def advice(self) -> str:
        """What to do about a variable that is missing."""
        if self.service is None:
            return "set it where the service starts; it may be set there and not here"
        return "set it where the service starts, and start it again"

    @property
    def known(self) -> dict[str, str]:
        """The variables of this shell that the service has as well, as far as that is known."""
        there = self.service or {}
        return {name: value for name, value in self.shell.items() if there.get(name, True)}


_NOT_TRIED = "this shell does not have it, so it was not tried"


def _environment(directory: Path, address: str) -> Environment:
    """Ask the service of a directory which variables it has, if one answers."""
    if not address:
        return Environment(os.environ)
    connection = Connection(url=to_ask(address), data=directory)
    try:
        with connect(connection, retries=0, timeout_seconds=ANSWER_SECONDS) as client:
            found = client.settings(limit=1).variables
    except (HeadgateError, OSError):
        return Environment(os.environ)
    there = {one.name: one.is_set for one in found}
    return Environment(os.environ, there, {one.name: one.problem for one in found if one.problem})


# Whether slots could be used: their keys can be read, by the service alone; nothing is sent.


def slot_findings(settings: Settings, environ: Environment) -> Iterator[Finding]:
    """Look at the key of every slot; no finding tells one."""
    for name, slot in settings.slots.items():
        yield _examined(f"slot {name}", slot, environ)


def _examined(check: str, slot: SlotSettings, environ: Environment) -> Finding:
    if not slot.enabled:
        return ok(check, "is disabled in the file")
    variables = variables_of_slot(slot)
    missing, unseen = environ.missing(variables), environ.unseen(variables)
    if missing:
        return fail(check, missing, environ.advice)
    if wrong := environ.wrong(variables):
        return fail(check, wrong, environ.advice)
    if unseen:
        return ok(check, f"{unseen}; {_NOT_TRIED}")
    try:
        read_key(slot, environ.shell)
        mode = 0 if slot.key_file is None else Path(slot.key_file).expanduser().stat().st_mode
    except InvalidSettingError as error:
        return fail(check, error.problem, "correct it; the slot sends nothing without its key")
    except OSError as error:
        return fail(check, f"{slot.key_file}: {error.strerror}", "see whether it is still there")
    if mode & _OTHERS:
        return warn(check, f"others may read {slot.key_file}", f"run chmod 600 {slot.key_file}")
    return ok(check, f"its key is in {slot.key_env or slot.key_file}")


# Whether the store and the ledger can be reached, at which version they are, and their clock.

FEW_SECONDS = 1.0
MANY_SECONDS = 10.0

_DAMAGED = ("CorruptError", "NotADBError")
_SERVER_TIME = "SELECT EXTRACT(EPOCH FROM clock_timestamp())::double precision"


def store_findings(settings: Settings, directory: Path) -> Iterator[Finding]:
    """Look at the store, without changing or founding it."""
    try:
        if settings.store.url == "memory:":
            yield warn("store", "in memory", "tasks are lost at the end; this is for trying out")
        elif is_shared(settings):
            yield from _postgres(settings.store.url or "", settings)
        else:
            yield from _sqlite(sqlite_file(settings, directory), settings)
    except HeadgateError as error:
        yield fail("store", str(error), _advice(error))


def _advice(error: HeadgateError) -> str:
    if type(error.__cause__).__name__ in _DAMAGED:
        return "it is damaged; stop the service, and put a backup in its place: headgate restore"
    return "nothing is taken before it can be reached"


def ledger_findings(settings: Settings) -> Iterator[Finding]:
    """Look at a ledger that is outside the store."""
    url = settings.ledger.url
    if url is None or url == settings.store.url:
        yield ok("ledger", "in the store")
        return
    try:
        asyncio.run(_reach(url))
        yield ok("ledger", f"{url.partition(':')[0]} answers")
    except HeadgateError as error:
        yield fail("ledger", str(error), "nothing starts before it can be reached")


def telemetry_findings(settings: Settings) -> Iterator[Finding]:
    """Look for the packages that spans need, if they are wanted."""
    if not settings.telemetry.otel:
        return
    try:
        with naming_extras("telemetry.otel"):
            import opentelemetry.sdk.trace  # noqa: F401, PLC0415  an extra
    except InvalidSettingError as error:
        yield fail("telemetry", str(error), "or leave telemetry.otel out of the settings")
    else:
        yield ok("telemetry", "the packages of OpenTelemetry are there")


async def _reach(url: str) -> None:
    async with connect_budget(url) as tracker:
        # One step shows more than a connection: replicas of Redis must confirm it.
        await tracker.ledger.accounts(ROOT, most=1)


def _sqlite(path: Path, settings: Settings) -> Iterator[Finding]:
    from headgate.storage.sqlite import SqliteReader  # noqa: PLC0415

    if not path.exists():
        yield ok("store", f"{path} is created at the first start")
        return
    yield from _versions(SqliteReader(path), str(path), settings)
    yield ok("clock", "the store is on this machine")


def _postgres(url: str, settings: Settings) -> Iterator[Finding]:
    with naming_extras("store.url"):
        from headgate.storage.postgres import PostgresReader, domain_url  # noqa: PLC0415

    database = PostgresReader(domain_url(url, settings.store.domain))
    yield from _versions(database, "postgresql", settings)
    try:
        before = time.time()
        at = float(database.begin().read(_SERVER_TIME)[0][0])
        apart_seconds = at - (before + time.time()) / 2
    finally:
        database.rollback()
        database.close()
    found = f"the server is {apart_seconds:+.2f} s from this machine"
    advice = "set both clocks by NTP; deadlines and leases are judged by the server's"
    if abs(apart_seconds) > MANY_SECONDS:
        yield fail("clock", found, advice)
    elif abs(apart_seconds) > FEW_SECONDS:
        yield warn("clock", found, advice)
    else:
        yield ok("clock", found)


def _versions(database: Database, name: str, settings: Settings) -> Iterator[Finding]:
    try:
        transaction = database.begin()
        judged = _judged(transaction, name)
        yield judged
        if judged.verdict == "ok":
            yield _room(transaction, settings)
            now, prices = time.time(), PriceList(settings.price_overrides)
            yield from price_findings(transaction, now, prices)
            yield from silence_findings(transaction, now, target_estimates(settings.all_targets))
            yield from claim_findings(transaction)
            yield from replacement_findings(transaction, now)
    finally:
        database.rollback()
        database.close()


def _room(transaction: Transaction, settings: Settings) -> Finding:
    most = settings.scheduler.max_store_bytes
    measured = transaction.measure(is_limited=True)
    size = msgspec.structs.replace(measured, max_bytes=most)
    found = f"the store takes {in_mebibytes(size.used_bytes)}"
    if most is not None:
        found += f" of {in_mebibytes(most)}"
    if size.problem:
        return fail("room", found, size.problem)
    if size.excess_bytes:
        more = "free some of its disk" if most is None else "raise scheduler.max_store_bytes"
        return warn("room", found, f"it deletes ended tasks for want of room; {more}")
    return ok("room", found)


def _judged(transaction: Transaction, name: str) -> Finding:
    older: list[str] = []
    for part, migrations in PARTS:
        version, known = schema_version(transaction, part), migrations[-1].number
        if version > known:
            found = f"{name}: the {part} tables are at version {version}, known are {known}"
            return fail("store", found, "install a newer headgate")
        if version < known:
            older.append(part)
    if older:
        advice = "the next start brings it up to date; back it up before"
        return warn("store", f"{name}: {', '.join(older)} tables are of an older version", advice)
    return ok("store", f"{name}: all tables are up to date")


def price_findings(transaction: Transaction, now: float, prices: PriceList) -> Iterator[Finding]:
    """Look for models that were used in the last day though nobody knows their price."""
    used = unpriced(transaction, since=hour_of(now - UNPRICED_SECONDS))
    found = [one for one in used if not prices.is_known(one.model)]
    for one in found:
        yield warn("prices", f"{one.model!r} {one.problem}", price_advice(one.model))
    if not found:
        yield ok("prices", "every model that was used in the last day has a price")


def silence_findings(
    transaction: Transaction, now: float, estimates: Mapping[str, TargetEstimate]
) -> Iterator[Finding]:
    """Look for work of the last day that reports nothing, from its first task on."""
    found = silent_kinds(transaction, since=now - SILENT_SECONDS, estimates=estimates, least=1)
    for one in found:
        yield warn("estimates", f"{one.kind.name!r} {one.problem}", one.advice)
    if not found:
        yield ok("estimates", "work in limited budgets reports what it used, or has an estimate")


def claim_findings(transaction: Transaction) -> Iterator[Finding]:
    """Look for budgets in which tenants claim more than they may spend."""
    found = unaccepted(transaction, most=MAX_CLAIMS)
    for scope, micro_usd, tokens in found:
        amounts = f"{format_usd(micro_usd)} and {tokens:,} tokens"
        line = (
            f"Tenants claim {amounts} in {scope or 'root'} beyond their limits; it does not count"
        )
        command = f"headgate budget adjust {scope or 'root'} --accept --data DIR --reason WHY"
        advice = f"decide with `{command}`, or with --reject; DIR is the data directory"
        yield warn("claims", line, advice)
    if not found:
        yield ok("claims", "no tenant claims more than its budgets allow")


def replacement_findings(transaction: Transaction, now: float) -> Iterator[Finding]:
    """Look for budgets that were set by hand and that the file has replaced."""
    found = read_replaced_budgets(transaction, since=now - REPLACED_SECONDS)
    for one in found:
        command = f"headgate budget set {one.name}"
        advice = f"set it again with `{command}`, or accept it: headgate budget reset {one.name}"
        yield warn("budgets", one.line, advice)
    if not found:
        yield ok("budgets", "the file has replaced no budget that was set by hand")


# Whether targets could be used: reachable, there to be run, importable; nothing is sent or run.

MAX_CLAIMS = 10
CONNECT_SECONDS = 3.0
_PORTS = {"http": 80, "https": 443}


def target_findings(settings: Settings, environ: Environment) -> Iterator[Finding]:
    """Look at every target."""
    for name, target in settings.targets.items():
        yield _examined_target(f"target {name}", name, target, environ)


def _examined_target(check: str, name: str, target: Target, there: Environment) -> Finding:
    missing, unseen = there.missing(variables_of(target)), there.unseen(variables_of(target))
    if missing:
        return fail(check, missing, there.advice)
    if unseen:
        return ok(check, f"{unseen}; {_NOT_TRIED}")
    environ = there.shell
    try:
        match target:
            case HttpTarget():
                build_executor(name, target, environ=environ, clock=time.time)
                return _reached(check, target)
            case CommandTarget():
                build_executor(name, target, environ=environ, clock=time.time)
                return _found(check, target)
            case CallableTarget():
                executor = build_executor(name, target, environ=environ, clock=time.time)
                asyncio.run(executor.open())
                return ok(check, f"{target.entry_point} can be imported")
            case RayTarget():
                executor = build_executor(name, target, environ=environ, clock=time.time)
                return asyncio.run(_examined_cluster(check, executor))
            case _:
                return ok(check, "its tasks are pulled by workers")
    except HeadgateError as error:
        return fail(check, str(error), "correct the target in the settings")


async def _examined_cluster(check: str, executor: Executor) -> Finding:
    await executor.open()
    try:
        room = await executor.room() if isinstance(executor, RemoteExecutor) else None
    finally:
        await executor.close()
    if room is None or room.free > 0:
        has_room = "" if room is None else f"; it has room for {room.free} more tasks"
        return ok(check, f"the cluster answers{has_room}")
    advice = "tasks of this target wait until there is room"
    return warn(check, room.why, advice)


def _reached(check: str, target: HttpTarget) -> Finding:
    url = target.url if target.resolver is None else target.resolver.url
    try:
        place = urlsplit(url)
        host, port = place.hostname or "", place.port or _PORTS.get(place.scheme, 80)
    except ValueError:
        host, port = "", 0
    if not host or "{" in host:
        return ok(check, "its address is known when a task runs")
    if target.proxy is not None:
        return ok(check, "goes through a proxy")
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        advice = "start it, or correct the address; tasks fail until it answers"
        return warn(check, f"{host} port {port} does not answer: {error}", advice)
    return ok(check, f"{host} port {port} answers")


def _found(check: str, target: CommandTarget) -> Finding:
    program = target.command[0]
    if target.cwd is not None and not Path(target.cwd).is_dir():
        return fail(check, f"{target.cwd} is not a folder", "make it, or correct cwd")
    if "{" in program:
        return ok(check, "its program is known when a task runs")
    path = target.env.get("PATH", os.environ.get("PATH"))
    if shutil.which(program, path=path) is None:
        return fail(check, f"{program} cannot be run", "install it, or write its whole path")
    return ok(check, f"{program} can be run")


def command_findings(
    settings: Settings, directory: Path, settings_path: Path | None
) -> Iterator[Finding]:
    """Say how commands are confined, and which secrets those of other users could read."""
    targets = {n: t for n, t in settings.targets.items() if isinstance(t, CommandTarget)}
    if not targets:
        return
    ended = confinement_of_this_machine()
    found = f"what they leave running is ended {ended}"
    if not launcher().sets_user:
        advice = "install util-linux 2.33 or newer: without it commands may gain privileges"
        if sys.platform == "darwin":
            advice = "macOS has none, so commands may gain privileges; use Linux for untrusted ones"
        yield warn("commands", f"setpriv is missing; {found}", advice)
    else:
        yield ok("commands", found)
    secrets = [directory, directory / TOKEN_FILE, *([settings_path] if settings_path else ())]
    for name, target in targets.items():
        if target.run_as is None:
            continue
        check = f"run_as {name}"
        try:
            user = command_user(target.run_as, setting=f"targets.{name}.run_as")
        except InvalidSettingError:
            continue  # Said of the target itself.
        readable = [str(path) for path in secrets if user.may_read(path.absolute())]
        if readable:
            advice = f"run chmod go-rwx {' '.join(readable)}, or name another user"
            yield fail(check, f"the user {user.name} may read {', '.join(readable)}", advice)
        else:
            yield ok(check, f"the user {user.name} may read neither data, token nor settings")


# Whether calls could go through the gateway: upstreams answer to their keys, models have prices.
#
# Rule: one request for the list of models is sent with each key, which costs nothing. No finding
# tells a key.

UPSTREAM_SECONDS = 5.0
UPSTREAM_ANSWERS = 8
GIVEN_TO_TASKS = tuple(name for names in GATEWAY_VARIABLES.values() for name in names)
"""What tasks are given so that their calls go through the gateway."""

ANTHROPIC_VERSION = "2023-06-01"
_REFUSED = (401, 403)
_ERROR, _SERVER_ERROR = 400, 500
_PASSED_THROUGH = {
    "loopback": "clients' own keys are passed through on loopback",
    "always": "clients' own keys are passed through",
}


class UpstreamKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key to ask an upstream with: what people call it, and the headers that carry it."""

    check: str
    name: str
    url: str
    headers: dict[str, str]

    def __repr__(self) -> str:
        return f"UpstreamKey({self.check!r}, {self.name!r})"


def gateway_findings(settings: Settings, environ: Environment) -> Iterator[Finding]:
    """Look at the upstreams, the prices of the models that are routed, and what tasks are given."""
    if not settings.gateway.enabled:
        yield ok("gateway", "is switched off in the settings")
        return
    keys: list[UpstreamKey] = []
    for name, upstream in settings.all_upstreams.items():
        found = _keys_of(settings, name, upstream, environ)
        if isinstance(found, Finding):
            yield found
        else:
            keys += found
    if keys:
        yield from asyncio.run(_asked(keys))
    yield from _routed_prices(settings)
    yield from _variables_before_gateway(settings, environ.shell)


def _keys_of(
    settings: Settings, name: str, upstream: UpstreamSettings, there: Environment
) -> list[UpstreamKey] | Finding:
    """Return the keys of an upstream that can be read, or what is to be said without any."""
    check = f"upstream {name}"
    keys: dict[str, str] = {}
    unseen = there.unseen(variables_of_upstream(upstream))
    if wrong := there.wrong(variables_of_upstream(upstream)):
        return fail(check, wrong, "correct it where the service starts; no call goes there")
    if unseen:
        return ok(check, f"{unseen}; {_NOT_TRIED}")
    environ = there.known
    try:
        headers = upstream_headers(name, upstream, environ)
        if upstream.key_env is not None and upstream.key_env in environ:
            keys[upstream.key_env] = read_upstream_key(name, upstream, environ)
    except InvalidSettingError as error:
        return fail(check, error.problem, "correct it where the service starts; no call goes there")
    read = SlotKeys(settings, environ)
    for slot in upstream.slots:
        if not settings.slots[slot].enabled:
            continue
        try:
            keys[f"slot {slot}"] = read(slot)
        except InvalidSettingError:
            continue  # Said of the slot itself.
    of_slots = {one for slot in upstream.slots for one in variables_of_slot(settings.slots[slot])}
    unseen = there.unseen(of_slots)
    if not keys and unseen:
        return ok(check, f"{unseen}; {_NOT_TRIED}")
    if not keys:
        return _keyless(check, settings, name, upstream, there)
    url = f"{upstream.api_url}/models"
    return [
        UpstreamKey(check=check, name=shown, url=url, headers=headers | _carrying(upstream, key))
        for shown, key in keys.items()
    ]


def _carrying(upstream: UpstreamSettings, key: str) -> dict[str, str]:
    if upstream.kind == "anthropic":
        return {"x-api-key": key, "anthropic-version": ANTHROPIC_VERSION}
    return {"authorization": f"Bearer {key}"}


def _keyless(
    check: str,
    settings: Settings,
    name: str,
    upstream: UpstreamSettings,
    environ: Environment,
) -> Finding:
    why = "has no key"
    if upstream.slots:
        advice = "correct one of its slots; until then no call can go there"
        return warn(check, f"{why}: none of its slots has one that can be read", advice)
    if upstream.key_env is not None:
        why += f": {environ.missing([upstream.key_env])}"
    passed = _PASSED_THROUGH.get(settings.gateway.passthrough_keys)
    needs_token = auth_rules(settings).needs_token
    if passed is None or needs_token:
        found = f"{why}, and clients' own keys are not passed through"
        if needs_token:
            found = f"{why}, and clients send tokens of Headgate"
        # The built-in ones are there whether anybody wants them or not.
        if name not in settings.upstreams and not (
            needs_token and has_no_upstream_key(settings, environ.known)
        ):
            return ok(check, found)
        return warn(check, found, "set its key where the service starts; no call can go there")
    if upstream.has_key and upstream.key_env not in OPTIONAL_KEYS:
        return warn(check, f"{why}; {passed}", environ.advice)
    return ok(check, f"{why}; {passed}")


async def _asked(keys: list[UpstreamKey]) -> list[Finding]:
    client = HttpClient(max_connections=UPSTREAM_ANSWERS, connect_timeout_seconds=UPSTREAM_SECONDS)
    turn = asyncio.Semaphore(UPSTREAM_ANSWERS)

    async def answer(key: UpstreamKey) -> Finding:
        async with turn:
            return await _answer_of(client, key)

    try:
        return list(await asyncio.gather(*map(answer, keys)))
    finally:
        await client.close()


async def _answer_of(client: HttpClient, key: UpstreamKey) -> Finding:
    host = urlsplit(key.url).netloc
    advice = "see whether it is up and base_url is right; calls wait or fail until it answers"
    try:
        async with asyncio.timeout(UPSTREAM_SECONDS):
            response = await client.send("GET", key.url, key.headers)
            await response.aclose()
    except TimeoutError:
        return warn(key.check, f"{host} does not answer within {UPSTREAM_SECONDS:g} s", advice)
    except httpx2.RequestError as error:
        return warn(key.check, f"{host} cannot be reached: {type(error).__name__}", advice)
    status = response.status_code
    if status in _REFUSED:
        found = f"{host} answers {status}: key refused ({key.name})"
        return fail(key.check, found, "put a key there that the provider takes")
    if status >= _SERVER_ERROR:
        return warn(key.check, f"{host} answers {status}", advice)
    if status >= _ERROR:
        found = f"{host} answers {status} where models are listed, so nobody knows whether it takes"
        return ok(key.check, f"{found} the key ({key.name})")
    return ok(key.check, f"{host} answers to the key in {key.name}")


def _routed_prices(settings: Settings) -> Iterator[Finding]:
    """Look for a price of every model that the settings name."""
    prices = PriceList(settings.price_overrides)
    routed = [model for alias in settings.models.values() for _, model in alias.members]
    routed += [
        pattern
        for upstream in settings.upstreams.values()
        for pattern in upstream.models
        if not set("*?[") & set(pattern)
    ]
    unknown = [model for model in dict.fromkeys(routed) if not prices.is_known(model)]
    for model in unknown:
        found = f"{model!r} is routed and has no price; budgets in dollars refuse its calls"
        yield warn("routes", found, price_advice(model))
    if routed and not unknown:
        yield ok("routes", "every model that the settings name has a price")


def _variables_before_gateway(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Name the variables of commands that keep their calls from going through the gateway."""
    for name, target in settings.targets.items():
        if not isinstance(target, CommandTarget) or not uses_gateway(target):
            continue
        passed = {variable for variable in target.pass_env if variable in environ}
        own = [one for one in GIVEN_TO_TASKS if one in target.env or one in passed]
        if own:
            found = f"its env sets {', '.join(own)}, which wins over what the gateway would set"
            advice = f"take it out, or write gateway = false in [{key_path('targets', name)}]"
            yield warn(f"target {name}", found, advice)


LEAST_FREE_BYTES = 100 * 2**20
FEW_FREE_BYTES = 2**30
ANSWER_SECONDS = 3.0
MOST_BYTES = 1_000

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def examine(path: Path | None, data: Path | None, store_url: str | None) -> list[Finding]:
    """Make all checks; without settings that can be used, only those that need none."""
    try:
        settings = settings_of(path, store_url)
        directory = (data or data_directory()).absolute()
    except HeadgateError as error:
        advice = "correct it; headgate config check says the same"
        others = error.others if isinstance(error, CallerError) else ()
        return [fail("settings", str(one), advice) for one in (error, *others)]
    file = held_file(settings, directory)
    folder, folders = (None, ()) if file is None else (file.parent, store_folders(file))
    holder = next((holder_of(one) for one in folders if is_held(one)), None)
    running = service_address(directory, is_running=True)
    address = running or _configured(settings)
    environ = _environment(directory, running)
    return [
        *_service(directory, address, data),
        *_settings(settings, path),
        *_directory(folder, holder),
        *store_findings(settings, directory),
        *ledger_findings(settings),
        *telemetry_findings(settings),
        *target_findings(settings, environ),
        *command_findings(settings, directory, settings_file(path)),
        *slot_findings(settings, environ),
        *gateway_findings(settings, environ),
        *_token(directory),
        _port(settings) if holder is None else _answers(holder.address),
    ]


def _service(directory: Path, address: str, data: Path | None) -> Iterator[Finding]:
    """Say which service is checked, where somebody may think of another one."""
    found = f"{directory} and {address} are checked"
    named = os.environ.get(URL_VARIABLE)
    if named and named.rstrip("/") != to_ask(address):
        advice = "doctor goes by --data and settings; name the directory of the other with --data"
        yield warn("service", f"{found}; {URL_VARIABLE} names another", advice)
    elif named or data is not None:
        yield ok("service", found)


def _configured(settings: Settings) -> str:
    host = settings.server.host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def _settings(settings: Settings, given: Path | None) -> Iterator[Finding]:
    found = settings_file(given)
    yield ok("settings", "all defaults; no headgate.toml here" if found is None else str(found))
    for line in warnings_of(settings):
        key, _, problem = line.partition(": ")
        yield warn("settings", key, problem)


def _directory(folder: Path | None, holder: Holder | None) -> Iterator[Finding]:
    if folder is None:
        yield ok("directory", "the store is not in a directory of this machine")
        return
    if not folder.is_dir():
        yield ok("directory", f"{folder} is made at the first start")
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        advice = f"run as its owner, or chown it to {os.geteuid()}"
        yield fail("directory", f"{folder} cannot be written by this user", advice)
        return
    if folder.stat().st_mode & _OTHERS:
        advice = f"run chmod 700 {folder}"
        yield warn("directory", f"others may look into {folder}", advice)
    else:
        yield ok("directory", str(folder))
    yield ok("process", f"process {holder.pid} uses it" if holder else "no service uses it now")
    yield _disk(folder)


def _disk(folder: Path) -> Finding:
    free_bytes = shutil.disk_usage(folder).free
    found = f"{free_bytes / 2**30:.1f} GiB free"
    if free_bytes < LEAST_FREE_BYTES:
        return fail("disk", found, "free some space; nothing is taken while the disk is full")
    if free_bytes < FEW_FREE_BYTES:
        return warn("disk", found, "free some space soon")
    return ok("disk", found)


def _token(directory: Path) -> Iterator[Finding]:
    path = directory / TOKEN_FILE
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        yield ok("token", f"{path} is not there; the first start on a new store writes it")
        return
    except OSError as error:
        yield fail("token", f"{path}: {error.strerror}", "run as the user of the service")
        return
    if mode & _OTHERS:
        advice = f"make a new token with headgate token create, and run chmod 600 {path}"
        yield fail("token", f"others may read {path}", advice)
    else:
        yield ok("token", str(path))


def _port(settings: Settings) -> Finding:
    from headgate.api.http.server import listen  # noqa: PLC0415

    host, port = settings.server.host, settings.server.port
    if port == 0:
        return ok("port", "any that is free")
    try:
        listen(host, port).close()
    except InvalidSettingError as error:
        answer = _answers(_configured(settings))
        if answer.verdict == "ok":
            return warn(
                "port",
                answer.found,
                "another service has it; start yours with headgate up --port N",
            )
        return fail("port", error.problem, "stop what uses it, or start with headgate up --port N")
    return ok("port", f"{host} port {port} is free")


def _answers(address: str) -> Finding:
    """Ask whoever serves at an address whether it is a service, and for its clock."""
    place = urlsplit(address)
    if not place.port:
        return ok("port", "the service has chosen a free one")
    host = "127.0.0.1" if place.hostname in (None, "0.0.0.0") else place.hostname  # noqa: S104
    connection = http.client.HTTPConnection(host, place.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/livez", headers={"Host": place.netloc})
        response = connection.getresponse()
        at = parsedate_to_datetime(response.headers["date"]).timestamp()
        body = response.read(MOST_BYTES)
    except (OSError, http.client.HTTPException, TypeError, ValueError) as error:
        return fail("port", f"{address} does not answer: {error}", "see the log of the service")
    finally:
        connection.close()
    from headgate.api.http.server import LIVE  # noqa: PLC0415

    if not body.startswith(LIVE):
        return fail("port", f"{address} is another program's", "start with headgate up --port N")
    # The header has whole seconds.
    apart_seconds = round(at - time.time())
    clock = "" if abs(apart_seconds) <= 1 else f", its clock {apart_seconds:+} s from this one"
    return ok("port", f"a service answers at {address}{clock}")
