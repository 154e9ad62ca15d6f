"""Sending steps to a service: in batches, each under a key, each once.

A batch is in the journal before it is on its way, with its bytes: whoever does not hear the answer
sends the same bytes under the same key, and the service answers as it did. A service without room
for all says for which; those go again under another key, in small batches until it has room.

Rule: an order is either with the service, or ended, or nothing of it was taken. Where nobody can
tell, it has failed and says so; it is never sent anew by itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from headgate.bodies.tasks import BatchBody, BatchEntryBody
from headgate.client.async_client import Client
from headgate.client.calls import IDEMPOTENCY_KEY
from headgate.core.tasks.submit_keys import KEPT_SECONDS
from headgate.errors import NotAllowedError, RequestRefusedError, ServiceUnavailableError
from headgate.runs.remote.insistence import Insistence
from headgate.runs.remote.journal import Ended, Journal, Sent, Taken, queued_task
from headgate.runs.remote.tasks import (
    BATCH_TASKS,
    Parcel,
    batch_body,
    batch_size,
    failed_task,
    lost_task,
)
from headgate.runs.remote.watch import ServerWatch

RESENT_SECONDS = KEPT_SECONDS - 3_600.0
"""How old a batch may be that is sent again: the service must know its key still."""

_ADVICE = {"unknown_target": "a service runs only what its configuration names"}


class ServerSending:
    """Sends the steps of one run."""

    def __init__(
        self, client: Client, line: Insistence, journal: Journal, watch: ServerWatch
    ) -> None:
        self._client = client
        self._line = line
        self._journal = journal
        self._watch = watch
        self._most = BATCH_TASKS

    async def send_all(self, parcels: Sequence[Parcel]) -> None:
        """Return when the service has taken or refused each of these."""
        left, tries = list(parcels), 0
        while left:
            self._watch.check()
            count = batch_size(left, self._most)
            again, why = await self._send(left[:count])
            tries = tries + 1 if len(again) == count else 1
            left[:count] = again
            if why:
                await self._line.wait_for_room(tries, why, self._watch.ended)
        self._line.has_room()

    async def take_up(self) -> None:
        """Send again what an earlier process got no answer to; the service knows what it took."""
        for sent in list(self._journal.pending.values()):
            if time.time() - sent.at < RESENT_SECONDS:
                await self._settle(sent, await self._answer(sent))
        await self.give_up()

    async def give_up(self) -> None:
        """End what nobody can know of: it is not sent again, and has failed."""
        for sent in list(self._journal.pending.values()):
            lost = [Ended(task=lost_task(order, sent.at)) for order in sent.orders]
            await self._journal.write(_nothing_taken(sent), *lost)

    async def _send(self, batch: Sequence[Parcel]) -> tuple[list[Parcel], str]:
        """Return what is to be sent again, and why it was not taken."""
        opened, first = self._journal.opened, batch[0].order
        assert opened is not None  # noqa: S101 - a journal begins with it
        sent = Sent(
            key=f"{opened.keys}-{first.number}-{first.generation}-{self._journal.sent}",
            at=time.time(),
            orders=tuple([parcel.order for parcel in batch]),
            body=batch_body(batch),
        )
        await self._journal.write(sent)
        self._watch.sending += 1
        try:
            entries = await self._answer(sent)
            why = await self._settle(sent, entries)
        finally:
            self._watch.has_sent()
        if any(entry.code is None for entry in entries):
            self._line.has_room()
        self._most = 1 if why else min(BATCH_TASKS, 2 * self._most)
        return [one for one, entry in zip(batch, entries, strict=True) if entry.retryable], why

    async def _answer(self, sent: Sent) -> list[BatchEntryBody]:
        """Return what became of each task of a batch, however often it has to be sent."""
        try:
            answer = await self._line.ask(lambda: self._post(sent))
        except NotAllowedError:
            await self._journal.write(_nothing_taken(sent))
            raise
        except RequestRefusedError as error:
            # One of many may have spoiled the request; one alone is refused for good.
            is_one = len(sent.orders) == 1
            entry = BatchEntryBody(code=error.code, error=str(error), retryable=not is_one)
            return [entry] * len(sent.orders)
        if len(answer.tasks) != len(sent.orders):
            line = "the answer to a batch has not as many entries as there were tasks"
            raise ServiceUnavailableError(line, code="bad_answer")
        return answer.tasks

    async def _post(self, sent: Sent) -> BatchBody:
        return await self._client.request(
            "POST",
            "/tasks/batch",
            answer=BatchBody,
            body=sent.body,
            headers={IDEMPOTENCY_KEY: sent.key},
        )

    async def _settle(self, sent: Sent, entries: Sequence[BatchEntryBody]) -> str:
        """Write down and tell what became of a batch; return why some is to be sent again."""
        pairs = list(zip(sent.orders, entries, strict=True))
        ids = tuple([entry.task_id or "" if entry.code is None else "" for entry in entries])
        refused = [
            failed_task(order, _problem(entry))
            for order, entry in pairs
            if entry.code is not None and not entry.retryable
        ]
        ends = [Ended(task=task) for task in refused]
        await self._journal.write(Taken(key=sent.key, task_ids=ids), *ends)
        for order, task_id in zip(sent.orders, ids, strict=True):
            if task_id:
                task = queued_task(order, task_id)
                self._watch.tell(task)
                self._watch.add(task, is_needed=order.is_needed)
        for task in refused:
            self._watch.tell(task)
        return next((entry.error or "" for _, entry in pairs if entry.retryable), "")


def _nothing_taken(sent: Sent) -> Taken:
    return Taken(key=sent.key, task_ids=("",) * len(sent.orders))


def _problem(entry: BatchEntryBody) -> str:
    advice = _ADVICE.get(entry.code or "")
    said = entry.error or entry.code or "the service did not take it"
    return said if advice is None else f"{said}; {advice}"
