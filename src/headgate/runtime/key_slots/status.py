"""What is configured for a slot at runtime, and what can be told of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headgate.core.key_slots.slot import SlotConfig, SlotRow, SlotStanding
from headgate.core.key_slots.wake import WakeTrigger
from headgate.provider import Provider


def _no_mark() -> object:
    """Mark a key that stays for as long as the process does."""
    return None


class SlotSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One slot with all that it needs to run.

    `read_key` raises `InvalidSettingError` where the key cannot be read. It is asked for each
    request, so that a key file may be replaced, and no key is kept. `key_mark` is cheap, and
    returns something else once the key may be another. `config_for` returns the configuration
    with a key.
    """

    config: SlotConfig
    provider: Provider
    read_key: Callable[[], str]
    is_logging: bool = True
    key_mark: Callable[[], object] = _no_mark
    config_for: Callable[[str], SlotConfig] | None = None


class LoopHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How a loop is doing on this node; times are Unix seconds.

    `problem` is empty while it does its work.
    """

    last_step_at: float | None = None
    restarts: int = 0
    problem: str = ""


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a slot; `next_wake` is due already if it is only being held.

    `polls` and `wakes` count by their outcome what this node has done since it started.
    """

    config: SlotConfig
    row: SlotRow
    standing: SlotStanding
    next_wake: WakeTrigger | None
    next_poll_at: float | None
    wake_loop: LoopHealth = LoopHealth()
    quota_loop: LoopHealth = LoopHealth()
    polls: dict[str, int] = {}
    wakes: dict[str, int] = {}
