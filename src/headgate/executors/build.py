"""From a target of the configuration to the executor that serves it.

Everything that is wrong with a target and can be known without a network or an import is an
`InvalidSettingError` here, with the name of the target in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from headgate.errors import InvalidSettingError
from headgate.executors.callable import CallableExecutor
from headgate.executors.command import CommandExecutor
from headgate.executors.executor import Executor
from headgate.executors.targets import (
    CallableTarget,
    CommandTarget,
    GatewayTarget,
    HttpTarget,
    PullTarget,
    RayTarget,
    Target,
)
from headgate.executors.templates import ObserveSlot, SlotKeys, no_slot_keys
from headgate.providers.prices import PriceList


def build_executors(
    targets: Mapping[str, Target],
    environ: Mapping[str, str],
    slot_keys: SlotKeys,
    *,
    prices: PriceList,
    observe_slot: ObserveSlot | None = None,
) -> dict[str, Executor]:
    """Return the executor of every target; what workers pull has none."""
    return {
        name: build_executor(
            name,
            target,
            environ=environ,
            clock=time.time,
            prices=prices,
            slot_keys=slot_keys,
            observe_slot=observe_slot,
        )
        for name, target in targets.items()
        if not isinstance(target, PullTarget)
    }


def build_executor(
    name: str,
    target: Target,
    *,
    environ: Mapping[str, str],
    clock: Callable[[], float],
    prices: PriceList | None = None,
    slot_keys: SlotKeys = no_slot_keys,
    observe_slot: ObserveSlot | None = None,
) -> Executor:
    """Return the executor of a target; it does nothing before it is opened.

    What workers pull is not executed here, and has none. `slot_keys` reads the keys of slots, and
    `observe_slot` is shown what came back to requests that were sent with one.
    """
    prices = prices or PriceList()
    match target:
        case HttpTarget():
            return _http_executor(
                name,
                target,
                environ=environ,
                clock=clock,
                prices=prices,
                slot_keys=slot_keys,
                observe_slot=observe_slot,
            )
        case CommandTarget():
            return CommandExecutor(
                name, target, environ=environ, prices=prices, slot_keys=slot_keys
            )
        case CallableTarget():
            return CallableExecutor(name, target, prices=prices)
        case RayTarget():
            from headgate.executors.ray import RayExecutor  # noqa: PLC0415  few have a cluster

            return RayExecutor(name, target, environ=environ, prices=prices)
        case GatewayTarget():
            from headgate.executors.gateway import GatewayExecutor  # noqa: PLC0415  as above

            return GatewayExecutor(target, clock=clock, prices=prices)
        case PullTarget():
            setting = f"targets.{name}.kind"
            raise InvalidSettingError(setting, "has no executor; workers run what they pull")


def _http_executor(
    name: str,
    target: HttpTarget,
    *,
    environ: Mapping[str, str],
    clock: Callable[[], float],
    prices: PriceList,
    slot_keys: SlotKeys,
    observe_slot: ObserveSlot | None,
) -> Executor:
    from headgate.executors.http import HttpExecutor  # noqa: PLC0415  httpx2 is slow to load

    return HttpExecutor(
        name,
        target,
        environ=environ,
        clock=clock,
        prices=prices,
        slot_keys=slot_keys,
        observe_slot=observe_slot,
    )
