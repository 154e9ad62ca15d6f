"""What `headgate config` finds out, as values that it can print or write.

It is apart from the commands so that a list of these loads no settings.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
from structlog.testing import capture_logs

from headgate.app import auth_rules, build_service
from headgate.cli.connection import Connection, connect
from headgate.config import (
    Settings,
    budgets,
    settings_file,
    warnings_of,
)
from headgate.config.loading import (
    DisplayedValue,
    decode,
    displayed_settings,
    variables_of,
    variables_of_slot,
    variables_of_upstream,
)
from headgate.config.messages import described_default, described_type, field_docs, key_path
from headgate.config.settings import OPTIONAL_KEYS, SECTIONS, TABLES
from headgate.config.slot_keys import read_key, read_upstream_key, wake_config
from headgate.config.sources import merge, merge_text, variable_warnings
from headgate.core.budgets.scopes import ROOT_NAME
from headgate.core.slots.status import quota_source_words
from headgate.core.text import did_you_mean, nearest
from headgate.errors import HeadgateError, InvalidSettingError, MissingPackageError
from headgate.executors.build import build_executor
from headgate.executors.executor import Executor
from headgate.executors.targets import CallableTarget, RayTarget

STANDARD_INPUT = "standard input"
SERVICE_SECONDS = 3.0


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is configured, by name, what keeps the service from starting, and likely mistakes."""

    file: str | None
    ok: bool = True
    projects: list[str]
    agents: list[str]
    targets: list[str]
    budgets: list[str]
    prices: list[str]
    rate_limits: list[str]
    slots: list[str]
    upstreams: list[str]
    models: list[str]
    problems: list[str]
    warnings: list[str]


def check_settings(given: Path | None, text: str | None, *, is_file_only: bool) -> CheckReport:
    """Check what the service would start with; the mistakes of the file are raised.

    `text` is what to check in place of a file. With `is_file_only` nobody asks whether the
    variables and packages that it needs are here, as before it is copied to another machine.
    """
    path = settings_file(given)
    name = STANDARD_INPUT if text is not None else None if path is None else str(path)
    if text is not None:
        merged = merge_text(text, STANDARD_INPUT, os.environ, {}, collects=True)
    else:
        merged = merge(path, os.environ, {}, collects=True)
    settings = decode(merged)
    problems, warnings = _build_problems(settings), warnings_of(settings)
    if not is_file_only:
        problems += _target_problems(settings)
        warnings += [*missing_keys(settings, os.environ), *_poll_warnings(settings)]
        warnings += variable_warnings(os.environ)
    return CheckReport(
        file=name,
        ok=is_file_only or not problems,
        projects=list(settings.projects),
        agents=list(settings.agents),
        targets=list(settings.targets),
        budgets=[scope or ROOT_NAME for scope in budgets(settings)],
        prices=list(settings.prices),
        rate_limits=list(settings.rate_limits),
        slots=list(settings.slots),
        upstreams=list(settings.all_upstreams),
        models=list(settings.models),
        problems=[] if is_file_only else problems,
        warnings=warnings,
    )


def settings_in_effect(given: Path | None) -> dict[str, DisplayedValue]:
    """Return every value in effect by its key, with its origin, and with secrets hidden."""
    merged = merge(settings_file(given), os.environ, {}, collects=True)
    return displayed_settings(decode(merged), merged.origins)


def with_overrides(
    shown: dict[str, DisplayedValue], given: Path | None
) -> tuple[dict[str, DisplayedValue], str]:
    """Lay over settings what was changed beside the file, at the service that runs with it.

    Returns the address of that service as well; empty if none answers, or it has another file.
    """
    path = settings_file(given)
    try:
        with connect(Connection(), retries=0, timeout_seconds=SERVICE_SECONDS) as client:
            answer = client.settings()
            url = client.url
    except (HeadgateError, OSError):
        return shown, ""
    if path is None or answer.file is None or Path(answer.file).resolve() != path.resolve():
        return shown, ""
    for one in answer.overrides:
        # What the file says stays visible: it is what a reset brings back.
        origin = f"override of {one.file_value}" if one.file_value is not None else "override"
        shown[one.key] = DisplayedValue(value=one.value, origin=origin)
    return shown, url


def _target_problems(settings: Settings) -> list[str]:
    """Say which variables, functions and packages the service would miss: it would not start."""
    problems = []
    for name, target in settings.targets.items():
        missing = sorted(variables_of(target) - set(os.environ))
        if missing:
            problems.append(
                f"{key_path('targets', name)}: the service does not start without "
                f"{' and '.join(missing)} in its environment; set it where you start it"
            )
        elif isinstance(target, CallableTarget | RayTarget):
            executor = build_executor(name, target, environ=os.environ, clock=time.time)
            try:
                asyncio.run(_open(executor))
            except (InvalidSettingError, MissingPackageError) as error:
                problems.append(str(error))
    return problems


async def _open(executor: Executor) -> None:
    await executor.open()
    await executor.close()


def _build_problems(settings: Settings) -> list[str]:
    """Build the service as `headgate up` does, which contacts nobody, and let go of it.

    What is wrong with the file is raised. What is missing on this machine is returned: a variable,
    for which a text is put in, or a package.
    """
    missing = {name for target in settings.targets.values() for name in variables_of(target)}
    environ = {**dict.fromkeys(missing, "unset"), **os.environ}
    try:
        # Whatever it would log of missing keys is among the warnings.
        with capture_logs():
            service = build_service(settings, data=Path(), environ=environ)
    except MissingPackageError as error:
        return [str(error)]
    if service.telemetry is not None:
        service.telemetry.close()
    return []


def missing_keys(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Say which slots and upstreams lack their keys here, one line each.

    Of the built-in upstreams one with a key is enough: nobody need use the other.
    """
    lines = []
    for name, slot in settings.slots.items():
        missing = sorted(variables_of_slot(slot) - set(environ))
        if missing and slot.enabled:
            lines.append(
                f"{key_path('slots', name)}: needs {', '.join(missing)} in the environment"
            )
        elif slot.enabled:
            lines += _problems(partial(read_key, slot, environ))
    if not settings.gateway.enabled:
        return lines
    optional = frozenset() if auth_rules(settings).needs_token else OPTIONAL_KEYS
    for name, upstream in settings.upstreams.items():
        missing = sorted(variables_of_upstream(upstream) - optional - set(environ))
        if missing:
            key = key_path("upstreams", name)
            lines.append(f"{key}: needs {', '.join(missing)} in the environment")
    for name, upstream in settings.all_upstreams.items():
        if upstream.key_env is not None and upstream.key_env in environ:
            lines += _problems(partial(read_upstream_key, name, upstream, environ))
    if not optional and has_no_upstream_key(settings, environ):
        lines.append(
            f"gateway: no upstream has a key, and clients send tokens of Headgate; set {_BUILT_IN}"
            " where the service starts"
        )
    return lines


_BUILT_IN = " or ".join(sorted(key for key in OPTIONAL_KEYS if key is not None))


def has_no_upstream_key(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Tell whether no upstream has a key, and none is set up to work without."""
    return settings.gateway.enabled and not any(
        upstream.slots or upstream.key_env is None or upstream.key_env in environ
        for upstream in settings.all_upstreams.values()
    )


def _poll_warnings(settings: Settings) -> list[str]:
    """Say what polls cost that are no GET."""
    return [
        f"{key_path('slots', name, 'poll')}: "
        f"{quota_source_words(wake_config(settings.quota, slot))}"
        for name, slot in settings.slots.items()
        if slot.enabled and slot.poll == "request"
    ]


def _problems(read: Callable[[], str]) -> list[str]:
    """Say why a key that is there is none."""
    try:
        read()
    except InvalidSettingError as error:
        return [str(error)]
    return []


class ExplainedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One key of the settings file: where it is written, what it may be, and what it does."""

    section: str
    key: str
    value: str
    default: str
    meaning: str


def explained_settings(word: str) -> list[ExplainedSetting]:
    """Return the settings whose section or key has this word in it, in the order of the file.

    A section or a key of that very name goes before all that only have the word in it.
    """
    every = [
        ExplainedSetting(
            section=heading,
            key=field.encode_name,
            value=described_type(field.type),
            default=described_default(field),
            meaning=docs.get(field.name, ""),
        )
        for heading, kind in SECTIONS.items()
        for docs in (field_docs(kind),)
        for field in msgspec.structs.fields(kind)
    ]
    section, dot, key = word.rpartition(".")
    if dot and section in TABLES:
        every = [one for one in every if one.section == f"[{section}]"]
    wanted = key if dot else word
    found = [one for one in every if wanted in one.key or wanted in one.section]
    if not found:
        known = sorted({one.key for one in every})
        advice = did_you_mean(nearest(wanted, known), "headgate config explain lists all")
        problem = f"no setting has this in its name; {advice}"
        raise InvalidSettingError(word, problem)
    exact = [
        one
        for one in found
        if one.key == wanted or (not dot and one.section.strip("[]").partition(".")[0] == wanted)
    ]
    return exact or found
