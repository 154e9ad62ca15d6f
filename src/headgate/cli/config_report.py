"""What `headgate config` finds out, as values that it can print or write.

It is apart from the commands so that a list of these loads no settings.
"""

from __future__ import annotations

import os
import time
from importlib.resources import files
from pathlib import Path

import msgspec

from headgate.config import (
    Settings,
    SlotSettings,
    budgets,
    load_settings,
    settings_file,
    warnings_of,
)
from headgate.config.loading import (
    DisplayedValue,
    decode,
    displayed_settings,
    variables_of,
    variables_of_slot,
)
from headgate.config.messages import key_path
from headgate.config.slot_keys import read_key, wake_config
from headgate.config.sources import merge
from headgate.core.slots.status import quota_source_words
from headgate.errors import InvalidSettingError
from headgate.executors.build import build_executor

EXAMPLE = files("headgate.config").joinpath("example.toml")
ROOT_NAME = "root"


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is configured, by name, and what may be a mistake."""

    file: str | None
    ok: bool = True
    projects: list[str]
    agents: list[str]
    targets: list[str]
    budgets: list[str]
    prices: list[str]
    rate_limits: list[str]
    slots: list[str]
    warnings: list[str]


def check_settings(given: Path | None) -> CheckReport:
    """Check what the service would start with; the first mistake is raised."""
    path = settings_file(given)
    settings = load_settings(path, os.environ, {})
    return CheckReport(
        file=None if path is None else str(path),
        projects=list(settings.projects),
        agents=list(settings.agents),
        targets=list(settings.targets),
        budgets=[scope or ROOT_NAME for scope in budgets(settings)],
        prices=list(settings.prices),
        rate_limits=list(settings.rate_limits),
        slots=list(settings.slots),
        warnings=[
            *warnings_of(settings),
            *_target_warnings(settings),
            *_slot_warnings(settings),
            *_budget_warnings(settings),
        ],
    )


def settings_in_effect(given: Path | None) -> dict[str, DisplayedValue]:
    """Return every value in effect by its key, with its origin, and with secrets hidden."""
    merged = merge(settings_file(given), os.environ, {})
    return displayed_settings(decode(merged), merged.origins)


def _target_warnings(settings: Settings) -> list[str]:
    """Build what would serve each target; where variables are missing, only say which.

    A file is also checked where its secrets are not, as before a deployment.
    """
    warnings = []
    for name, target in settings.targets.items():
        missing = sorted(variables_of(target) - set(os.environ))
        if missing:
            key = key_path("targets", name)
            warnings.append(f"{key}: needs {', '.join(missing)} in the environment")
        else:
            build_executor(name, target, environ=os.environ, clock=time.time)
    return warnings


def _slot_warnings(settings: Settings) -> list[str]:
    """Say of which slots the key is not here, and what polls cost that are no GET."""
    warnings = []
    for name, slot in settings.slots.items():
        missing = sorted(variables_of_slot(slot) - set(os.environ))
        if missing and slot.enabled:
            key = key_path("slots", name)
            warnings.append(f"{key}: needs {', '.join(missing)} in the environment")
        elif slot.enabled:
            warnings += _key_warnings(slot)
        if slot.enabled and slot.poll == "request":
            words = quota_source_words(wake_config(settings.quota, slot))
            warnings.append(f"{key_path('slots', name, 'poll')}: {words}")
    return warnings


def _budget_warnings(settings: Settings) -> list[str]:
    """Say which budgets are of a project that the file does not name: they limit nothing."""
    return [
        f"{key_path('budgets', scope)}: there is no project {name!r}, so it limits nothing; "
        "add it under [projects], or correct the name"
        for scope in settings.budgets
        for kind, _, name in (scope.partition("/")[0].partition(":"),)
        if kind == "project" and name not in settings.projects
    ]


def _key_warnings(slot: SlotSettings) -> list[str]:
    try:
        read_key(slot, os.environ)
    except InvalidSettingError as error:
        return [str(error)]
    return []
