"""Whether slots could be used: their keys can be read, by the service alone; nothing is sent."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from headgate.cli.checks.findings import Finding, fail, ok, warn
from headgate.errors import InvalidSettingError
from headgate.settings import Settings, SlotSettings
from headgate.settings.shown import variables_of_slot
from headgate.settings.slot_keys import read_key

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def slot_findings(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Look at the key of every slot; no finding tells one."""
    for name, slot in settings.slots.items():
        yield _examined(f"slot {name}", slot, environ)


def _examined(check: str, slot: SlotSettings, environ: Mapping[str, str]) -> Finding:
    if not slot.enabled:
        return ok(check, "is disabled in the file")
    missing = sorted(variables_of_slot(slot) - set(environ))
    if missing:
        advice = "set it where the service starts; it may be set there and not here"
        return fail(check, f"{', '.join(missing)} is not set", advice)
    try:
        read_key(slot, environ)
        mode = 0 if slot.key_file is None else Path(slot.key_file).expanduser().stat().st_mode
    except InvalidSettingError as error:
        return fail(check, error.problem, "correct it; the slot sends nothing without its key")
    except OSError as error:
        return fail(check, f"{slot.key_file}: {error.strerror}", "see whether it is still there")
    if mode & _OTHERS:
        return warn(check, f"others may read {slot.key_file}", f"run chmod 600 {slot.key_file}")
    return ok(check, f"its key is in {slot.key_env or slot.key_file}")
