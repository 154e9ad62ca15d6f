"""What a simulation can end with, besides its result.

    HeadgateError
    └── SimulationError
        ├── DeadlockError          nothing is ready and no timer is set: it would wait for ever
        ├── StepLimitError         more steps than allowed: something spins
        ├── UnhandledError         a callback or a forgotten task raised, and nobody saw it
        ├── NotSimulatedError      the program asked for threads, which no seed can order
        └── HostCrashedError       the awaited work was on a host that crashed

Only the harness raises these; the service never does.
"""

from __future__ import annotations

from headgate.errors import HeadgateError


class SimulationError(HeadgateError):
    """The base of every failure of a simulation."""


class DeadlockError(SimulationError):
    """Every task waits for something that no task and no timer will bring about."""

    def __init__(self, at_seconds: float, waiting: tuple[str, ...]) -> None:
        tasks = ", ".join(waiting) if waiting else "no task at all"
        super().__init__(
            f"deadlock after {at_seconds:g} s: nothing is ready and no timer is set; "
            f"waiting: {tasks}"
        )
        self.at_seconds = at_seconds
        self.waiting = waiting


class StepLimitError(SimulationError):
    """The simulation took more steps than `max_steps`."""

    def __init__(self, at_seconds: float, max_steps: int) -> None:
        super().__init__(
            f"more than {max_steps} steps, now at {at_seconds:g} s: "
            "look for a loop that never waits, or raise max_steps"
        )
        self.at_seconds = at_seconds
        self.max_steps = max_steps


class UnhandledError(SimulationError):
    """An exception that asyncio would only have logged; its cause is the exception itself."""


class NotSimulatedError(SimulationError):
    """The program asked the loop for something outside the simulation."""

    def __init__(self, wanted: str, *, wanted_for: str) -> None:
        super().__init__(
            f"a simulated loop has no {wanted} (asked for by {wanted_for}); "
            "give the program a fake instead"
        )
        self.wanted = wanted
        self.wanted_for = wanted_for


class HostCrashedError(SimulationError):
    """The host crashed before the awaited work was finished."""

    def __init__(self, host: str) -> None:
        super().__init__(f"host {host} crashed before this work was finished")
        self.host = host
