"""One pipeline for all callers of a process: what they ask in one turn of the loop is sent at once.

A client spends several times on a call what the server does, so calls are gathered while others
are under way and sent as one batch, in the order in which they were made. Two batches are under way
at a time: the server works on one while this process reads the answers of the other.

Rule: a caller gets its own answer or its own error, whatever becomes of the others in its batch.
One that was cancelled before its batch left is not sent; one that was cancelled later is answered
to nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from headgate.errors import LedgerUnavailableError

MAX_BATCH = 128
MIN_SHARE = 32
MAX_UNDER_WAY = 2
MAX_WAITING = 20_000

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class SharedPipeline(Generic[Request, Answer]):
    """Gathers requests into batches; `send` answers each request with a value or an error."""

    def __init__(
        self, send: Callable[[Sequence[Request]], Awaitable[Sequence[Answer | Exception]]]
    ) -> None:
        self._send = send
        self._waiting: deque[tuple[Request, asyncio.Future[Answer]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._is_sender_due = False
        self._under_way = 0

    async def call(self, request: Request) -> Answer:
        """Send a request with the next batch, and wait for its answer."""
        if len(self._waiting) >= MAX_WAITING:
            problem = f"{MAX_WAITING} calls already wait for the ledger; call less at a time"
            raise LedgerUnavailableError(problem)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._start_sender()
        return await future

    async def close(self) -> None:
        """Stop sending; whoever still waits gets an error."""
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        if senders:
            await asyncio.wait(senders)
        self._is_sender_due = False
        _fail(self._waiting, "the ledger was closed before it answered; open it again")
        self._waiting.clear()

    def _start_sender(self) -> None:
        if self._is_sender_due or self._under_way >= MAX_UNDER_WAY:
            return
        # The task begins after everybody whose turn it is has called.
        self._is_sender_due = True
        sender = asyncio.create_task(self._send_all())
        self._senders.add(sender)
        sender.add_done_callback(self._senders.discard)

    async def _send_all(self) -> None:
        self._is_sender_due = False
        self._under_way += 1
        try:
            while self._waiting:
                batch = self._take_batch()
                if self._waiting:
                    self._start_sender()
                await self._send_batch(batch)
        finally:
            self._under_way -= 1

    def _take_batch(self) -> list[tuple[Request, asyncio.Future[Answer]]]:
        free = MAX_UNDER_WAY - self._under_way + 1
        share = min(max(MIN_SHARE, -(-len(self._waiting) // free)), MAX_BATCH)
        batch: list[tuple[Request, asyncio.Future[Answer]]] = []
        while self._waiting and len(batch) < share:
            request, future = self._waiting.popleft()
            if not future.done():
                batch.append((request, future))
        return batch

    async def _send_batch(self, batch: Sequence[tuple[Request, asyncio.Future[Answer]]]) -> None:
        if not batch:
            return
        try:
            answers = await self._send([request for request, _ in batch])
        except asyncio.CancelledError:
            _fail(batch, "the ledger was closed before it answered; open it again")
            raise
        except Exception as error:  # noqa: BLE001 - nobody in the batch may wait for ever
            _fail(batch, str(error), cause=error)
        else:
            _answer(batch, answers)


def _answer(
    batch: Sequence[tuple[Request, asyncio.Future[Answer]]], answers: Sequence[Answer | Exception]
) -> None:
    for (_, future), answer in zip(batch, answers, strict=True):
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _fail(
    waiting: Sequence[tuple[Request, asyncio.Future[Answer]]]
    | deque[tuple[Request, asyncio.Future[Answer]]],
    problem: str,
    *,
    cause: Exception | None = None,
) -> None:
    for _, future in waiting:
        if not future.done():
            error = LedgerUnavailableError(problem)
            error.__cause__ = cause
            future.set_exception(error)
