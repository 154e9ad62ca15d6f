"""What a process of its own needs to write for another one: a database, and a language for jobs.

Rule: whatever is sent can be sent again to another process, and means the same there. So a job is
data, or a function of a module with its arguments bound, and never something that was made on the
spot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from headgate.databases.jobs import Job
from headgate.databases.transaction import Database

Asked = TypeVar("Asked", bound=Job)


class Wire(Protocol):
    """How jobs and their answers are written as bytes, and read again."""

    def pack(self, job: Job) -> bytes:
        """Write one job; raise if it cannot be sent."""

    def unpack(self, packed: bytes) -> list[Job]:
        """Read jobs that were packed each by itself, and joined."""

    def pack_answers(self, jobs: Sequence[Job]) -> bytes:
        """Write what came of jobs, in their order."""

    def unpack_answers(self, packed: bytes, jobs: deque[Asked]) -> list[Asked]:
        """Read what came of the first of these jobs, take them out, and return them."""

    def join(self, packed: Sequence[bytes]) -> bytes:
        """Put jobs together that were packed each by itself."""


class Workplace(NamedTuple):
    """What is made in the process that writes."""

    database: Database
    wire: Wire


Recipe = Callable[[], Workplace]
"""Makes a workplace; it is sent to the process as its first order."""
