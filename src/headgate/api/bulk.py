"""Many tasks at once: cancel or try again whatever matches, in batches and within a time.

Rule: what one request does is bounded, in tasks and in time. It says what is left, and the same
request again goes on with that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Literal

import msgspec

from headgate.core.task import Draft, TaskRecord
from headgate.engine.engine import Engine
from headgate.errors import HeadgateError, IllegalMoveError, StoreError
from headgate.storage import queries
from headgate.storage.queries import BulkFilter
from headgate.storage.store import Queued, TurnedAway
from headgate.storage.transaction import Access

MAX_TASKS = 10_000
AT_ONCE = 100
MAX_SECONDS = 10.0

Again = Callable[[TaskRecord], Draft]
"""Makes a new task of one that ended, or raises an `InvalidTaskError`."""


RetryOutcome = Literal["taken", "refused", "full"]


class BulkResult(msgspec.Struct):
    """What became of the tasks that matched."""

    matched: int
    done: int = 0
    skipped: int = 0

    @property
    def remaining(self) -> int:
        """How many of them are left for the next request."""
        return max(0, self.matched - self.done - self.skipped)


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks match; not `is_all` if time was over before all were looked at.

    Those that are older than `next_before` were not.
    """

    matched: int
    next_before: str | None = None

    @property
    def is_all(self) -> bool:
        """Whether none is left to be looked at."""
        return self.next_before is None


class BulkWork:
    """Works on many tasks for one request."""

    def __init__(self, engine: Engine, access: Access) -> None:
        self._engine = engine
        self._access = access

    async def count(self, wanted: BulkFilter) -> int:
        """Return how many tasks match now."""
        return (await self.count_within(wanted, seconds=inf)).matched

    async def count_within(
        self, wanted: BulkFilter, *, seconds: float, before: str | None = None
    ) -> Counted:
        """Count the tasks that match, the newest first, until all are counted or time is over."""
        clock, wanted = asyncio.get_running_loop().time, self._narrowed(wanted)
        ends_at = clock() + seconds
        matched, is_over = 0, False
        while not is_over:
            asked_at = clock()
            part = partial(queries.count_part, wanted=wanted, before=before)
            found, before = await self._access.ask(part)
            matched += found
            # The next part takes about as long as this one.
            is_over = before is None or 2 * clock() - asked_at > ends_at
        return Counted(matched=matched, next_before=before)

    async def cancel(self, wanted: BulkFilter, *, limit: int) -> BulkResult:
        """Cancel tasks; what runs is asked to stop, and is not waited for."""
        result = BulkResult(await self.count(wanted))
        async for batch in self._batches(wanted, limit):
            for has_worked in await asyncio.gather(*map(self._cancel, batch)):
                _add(result, has_worked=has_worked)
        return result

    async def retry(self, wanted: BulkFilter, again: Again, *, limit: int) -> BulkResult:
        """Make a new task of each that ended; one that was tried again before is left out.

        The batch that meets a full queue is the last one.
        """
        result = BulkResult(await self.count(wanted))
        async for batch in self._batches(wanted, limit):
            answers = await self._retry(batch, again)
            result.done += answers.count("taken")
            result.skipped += answers.count("refused")
            if "full" in answers:
                break
        return result

    async def _batches(self, wanted: BulkFilter, limit: int) -> AsyncIterator[Sequence[str]]:
        found = await self._access.ask(
            partial(queries.ids, wanted=self._narrowed(wanted), limit=min(limit, MAX_TASKS)),
            is_long=True,
        )
        clock = asyncio.get_running_loop().time
        ends_at = clock() + MAX_SECONDS
        for batch in _parts(found):
            if clock() > ends_at:
                return
            yield batch

    def _narrowed(self, wanted: BulkFilter) -> BulkFilter:
        return self._engine.only_in_flight(wanted)

    async def _cancel(self, task_id: str) -> bool:
        try:
            return await self._engine.cancel_soon(task_id) is not None
        except IllegalMoveError:
            return False

    async def _retry(self, batch: Sequence[str], again: Again) -> list[RetryOutcome]:
        pairs = [(task_id, self._engine.new_id()) for task_id in batch]
        taken = await self._access.run(partial(queries.take_up, pairs=pairs))
        answers = await asyncio.gather(*(self._again(old, taken[old], again) for old in batch))
        submitted = [old for old, answer in zip(batch, answers, strict=True) if answer == "taken"]
        refused = [old for old, answer in zip(batch, answers, strict=True) if answer != "taken"]
        close_up = partial(queries.close_up, submitted=submitted, refused=refused)
        await self._access.run(close_up)
        return answers

    async def _again(self, old: str, new: str, again: Again) -> RetryOutcome:
        record = await self._engine.get(old)
        if record is None or not record.is_terminal:
            return "refused"
        try:
            draft = again(record)
        except StoreError:
            raise
        except HeadgateError:
            return "refused"
        task = msgspec.structs.replace(draft.task, id=new)
        # A refusal is not stored: the task that is tried again is there, and matches the next time.
        answer = await self._engine.submit_if_room(task, draft.terms, draft.submission)
        if isinstance(answer, TurnedAway):
            return "full"
        return "taken" if isinstance(answer, Queued) else "refused"


def _parts(task_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(task_ids), AT_ONCE):
        yield task_ids[start : start + AT_ONCE]


def _add(result: BulkResult, *, has_worked: bool) -> None:
    if has_worked:
        result.done += 1
    else:
        result.skipped += 1
