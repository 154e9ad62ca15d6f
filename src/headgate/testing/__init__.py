"""Deterministic simulation: virtual time, seeded schedules, hosts that crash between two awaits.

`simulate(main)` runs an async function on a fresh loop. The same program and seed give the same
trace; another seed tries another order of the tasks that are ready at the same time.

`FakeProvider` is a provider of keys to try slots with; it serves real HTTP.
"""

from __future__ import annotations

from headgate.testing.fake_provider import FakeProvider
from headgate.testing.simulation import (
    DEFAULT_MAX_STEPS,
    DEFAULT_START,
    DeadlockError,
    Host,
    HostCrashedError,
    NotSimulatedError,
    SimulatedLoop,
    Simulation,
    SimulationError,
    StepLimitError,
    TraceEvent,
    UnhandledError,
    VirtualClock,
    simulate,
)

__all__ = [
    "DEFAULT_MAX_STEPS",
    "DEFAULT_START",
    "DeadlockError",
    "FakeProvider",
    "Host",
    "HostCrashedError",
    "NotSimulatedError",
    "SimulatedLoop",
    "Simulation",
    "SimulationError",
    "StepLimitError",
    "TraceEvent",
    "UnhandledError",
    "VirtualClock",
    "simulate",
]
