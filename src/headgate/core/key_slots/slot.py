"""A key slot as plain data: what is configured, what is known, and what that means for tasks.

A slot is a provider's key with its quota window. `SlotRow` is all that is kept of one; it is the
same after a restart, and on every node. `SlotStanding` is what a decision needs of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.core.gates import GateClosure
from headgate.core.key_slots.quota import QuotaLimit
from headgate.core.key_slots.wake import SlotSchedule, WakeConfig

EXHAUSTED_PERCENT = 100.0

StartPhase = Literal["", "poll", "wake"]
"""How far a slot's start has come: `poll` waits for the first reading, `wake` for its wake."""


class SlotConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One slot as the rules see it.

    `key_digest` is the same for slots that use the same key at the same place, and so share a
    window; `settings_digest` changes with anything that is configured, the key included. Neither
    tells the key. `limit_type` and `limit_unit` name the row that drives wakes, if not the usual.
    """

    name: str
    provider: str
    wake: WakeConfig = WakeConfig()
    is_enabled: bool = True
    adaptive_polling: bool = False
    limit_type: str | None = None
    limit_unit: int | str | None = None
    key_digest: str = ""
    settings_digest: str = ""


class SlotReading(msgspec.Struct, frozen=True, kw_only=True):
    """The last thing that the provider said about the quota; times are Unix seconds.

    `percent_used` and `resets_at` are those of the row that drives wakes, or of the one that is
    used up. A key without an open window has no `resets_at`. `is_used_up_again` means that the
    reading before was used up as well, and that its reset had passed by this one.
    """

    read_at: float
    percent_used: float | None = None
    resets_at: float | None = None
    level: str | None = None
    limits: tuple[QuotaLimit, ...] = ()
    is_exhausted: bool = False
    is_used_up_again: bool = False


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who does something for a slot just now, and since when; after `until` another may."""

    id: str
    until: float
    began_at: float | None = None


class SlotRow(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept of a slot.

    `config` is what it was last kept under. `is_off` means that somebody disabled it by hand.
    `wake_claim` is the wake that was claimed last and whose answer is not known yet. `version`
    grows with every change of any slot.
    """

    name: str
    schedule: SlotSchedule = SlotSchedule()
    reading: SlotReading | None = None
    config: SlotConfig | None = None
    is_off: bool = False
    start: StartPhase = ""
    poll_claim: Claim | None = None
    wake_claim: Claim | None = None
    version: int = 0


Rows = dict[str, SlotRow]
"""What is kept of several slots, by their names."""


class SlotStanding(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision needs of a slot: whether its tasks are held, and how much room it has."""

    name: str
    provider: str
    hold: GateClosure | None = None
    percent_used: float | None = None
    resets_at: float | None = None
