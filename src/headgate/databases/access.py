"""What a subject that keeps rows of its own needs of the store: a clock, and two ways in.

Rule: an operation or a question is a function of a module, with its arguments bound by `partial`,
so that it can be sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from headgate.databases.transaction import Transaction

Result = TypeVar("Result")


class Access(Protocol):
    """A way into a database that others use at the same time."""

    def now(self) -> float:
        """Return the time by which the store judges."""

    async def run(self, operation: Callable[[Transaction, float], Result]) -> Result:
        """Change something, at a time that is given; the answer means that it is on disk.

        After a lost connection it may be run twice, so it recognises its own work.
        """

    async def ask(
        self, question: Callable[[Transaction], Result], *, is_long: bool = False
    ) -> Result:
        """Read what has been committed.

        One that may have to look at everything says that it `is_long`. Others are given up soon by
        a server that is slow, so that they do not keep everybody waiting behind them.
        """
