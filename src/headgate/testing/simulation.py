"""A whole simulation in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headgate.testing.clock import DEFAULT_START
from headgate.testing.loop import DEFAULT_MAX_STEPS, SimulatedLoop, TraceEvent

T = TypeVar("T")


@dataclass(frozen=True)
class Simulation(Generic[T]):
    """What came out: the result, the recorded events, the virtual seconds and the steps it took."""

    result: T
    trace: tuple[TraceEvent, ...]
    seconds: float
    steps: int


def simulate(
    main: Callable[[SimulatedLoop], Coroutine[Any, Any, T]],
    *,
    seed: int | None = 0,
    start: float = DEFAULT_START,
    max_steps: int = DEFAULT_MAX_STEPS,
) -> Simulation[T]:
    """Run `main(loop)` on a fresh `SimulatedLoop`, and cancel at its end what it left running."""
    loop = SimulatedLoop(seed=seed, start=start, max_steps=max_steps)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            result = runner.run(main(loop))
            loop.check()
        finally:
            loop.ending = True
        seconds, steps = loop.time(), loop.steps
    return Simulation(result, tuple(loop.trace), seconds, steps)
