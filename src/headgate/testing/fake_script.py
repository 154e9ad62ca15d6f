"""What a fake provider does instead of answering well: errors, delays, nonsense, silence."""

from __future__ import annotations

from collections import deque
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headgate.errors import InvalidSettingError

MAX_STEPS = 1_000
MAX_LATENCY_MS = 3_600_000
HUGE_BODY_BYTES = 256 << 10

FakeKind = Literal[
    "ok", "401", "403", "404", "408", "429", "500", "502", "503", "504",
    "exhausted", "weekly", "garbage", "wrong-shape", "huge", "redirect", "drop", "timeout",
]  # fmt: skip
"""`timeout` keeps a request waiting for an hour, `drop` closes the connection without an answer."""


FakeUse = Literal["quota", "request"]
"""What a request does with a quota: it reads it, or it uses it."""
FakeUses = Literal["any", "quota", "request"]


class FakeStep(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """The answer to the next requests, `times` of them.

    `on` says which requests it is for: those that read the quota, those that use it, or any.
    """

    kind: FakeKind
    retry_after: Annotated[str, Meta(max_length=100)] | int | None = None
    times: Annotated[int, Meta(ge=1, le=MAX_STEPS)] = 1
    latency_ms: Annotated[int, Meta(ge=0, le=MAX_LATENCY_MS)] = 0
    message: Annotated[str, Meta(max_length=10_000)] | None = None
    on: FakeUses = "any"


class FakeScript:
    """Steps in their order; a request takes the first that is for it."""

    def __init__(self) -> None:
        self._steps: deque[FakeStep] = deque()

    @property
    def steps(self) -> tuple[FakeStep, ...]:
        """What is still to come."""
        return tuple(self._steps)

    def add(self, step: FakeStep) -> None:
        """Add a step, `times` over."""
        if len(self._steps) + step.times > MAX_STEPS:
            raise InvalidSettingError("times", f"no more than {MAX_STEPS} answers can wait")
        self._steps.extend([msgspec.structs.replace(step, times=1)] * step.times)

    def clear(self) -> None:
        """Forget what is still to come."""
        self._steps.clear()

    def take(self, on: FakeUse) -> FakeStep | None:
        """Take the step of a request; None if there is none, and it is answered well."""
        for step in self._steps:
            if step.on in ("any", on):
                self._steps.remove(step)
                return step
        return None
