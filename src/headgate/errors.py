"""Every error that Headgate raises, as one tree.

    HeadgateError
    └── CallerError                  the input is wrong: fix it and call again
        ├── InvalidSnapshotError     a snapshot that no decision can be made from
        ├── IllegalTransitionError   a task was asked to make a move its state does not have
        ├── InvalidSettingError      a setting outside its range, or two that exclude each other
        ├── InvalidScopeError        a budget scope that is not a path of `kind:name` parts
        ├── InvalidAmountError       an amount of money or tokens that cannot be booked
        └── IllegalSettlementError   a reservation was asked to make a move its state does not have

Errors carry fields for programs and one line for people; the line says what to do next.
"""

from __future__ import annotations


class HeadgateError(Exception):
    """The base of everything that Headgate raises on purpose."""


class CallerError(HeadgateError, ValueError):
    """The caller's input is wrong; trying again unchanged cannot help."""


class InvalidFieldError(CallerError):
    """One named field of an input has a value that cannot be used."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class InvalidSnapshotError(InvalidFieldError):
    """A scheduler snapshot holds a value from which no decision can be made."""


class InvalidSettingError(InvalidFieldError):
    """A setting is outside its range, or contradicts another one."""


class InvalidScopeError(InvalidFieldError):
    """A budget scope is not a path of `kind:name` parts."""


class InvalidAmountError(InvalidFieldError):
    """An amount of money or tokens cannot be booked."""


class IllegalMoveError(CallerError):
    """A state machine was asked for a move that its table does not have."""

    def __init__(
        self,
        subject: str,
        current: str,
        wanted: str,
        allowed: tuple[str, ...],
        *,
        advice: str = "",
    ) -> None:
        legal = ", ".join(allowed) if allowed else "nothing, it is final"
        line = f"{subject} is {current} and cannot become {wanted}; "
        super().__init__(line + (advice or f"it may become {legal}"))
        self.advice = advice
        self.subject = subject
        self.current = current
        self.wanted = wanted
        self.allowed = allowed


class IllegalTransitionError(IllegalMoveError):
    """A task cannot make this move; see the transition table in `headgate.core.tasks`."""


class IllegalSettlementError(IllegalMoveError):
    """A reservation cannot make this move; see the table in `headgate.core.reservations`."""
