"""The outbox: settlements for a ledger outside the store, told until it has answered.

The row was written together with the outcome, so none is lost; and a ledger recognises a repeat,
so none is booked twice. One that the ledger refuses for good is logged and let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from headgate.core.books import SettleRequest
from headgate.errors import CallerError, LedgerUnavailableError, StoreError, StoreUnavailableError
from headgate.ledger import Ledger
from headgate.store import TaskStore

log = structlog.get_logger("headgate.outbox")

MAX_SENT = 256
PAUSE_SECONDS = 0.05
RETRY_SECONDS = 1.0
LAST_SECONDS = 10.0


class SettlementOutbox:
    """Carries settlements from the store to the ledger."""

    def __init__(self, store: TaskStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._problem = ""
        self.has_told: Callable[[], None] = lambda: None
        """Is called when the ledger has booked something: it may have room now, or never will."""

    async def run(self) -> None:
        """Carry until cancelled."""
        while True:
            try:
                sent = await self.run_once()
                await asyncio.sleep(0 if sent else PAUSE_SECONDS)
            except StoreUnavailableError as error:
                log.warning("settlements wait for the ledger", problem=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def finish(self) -> None:
        """Carry all that is left, before the end: nobody may come after this process.

        What cannot be carried now stays in the store, for whoever starts over it next.
        """
        try:
            async with asyncio.timeout(LAST_SECONDS):
                while await self.run_once():
                    pass
        except TimeoutError:
            log.warning("settlements are left in the outbox", problem="the ledger is too slow")
        except StoreUnavailableError as error:
            log.warning("settlements are left in the outbox", problem=str(error))

    async def run_once(self) -> int:
        """Carry what waits, and return how many settlements the ledger has answered."""
        requests = await self._store.outbox(limit=MAX_SENT)
        if not requests:
            return 0
        answered = await asyncio.gather(*(self._tell(request) for request in requests))
        pairs = zip(requests, answered, strict=True)
        told = [request.reservation_id for request, is_told in pairs if is_told]
        if told:
            await self._store.sent(told)
            self.has_told()
        if len(told) < len(requests):
            raise LedgerUnavailableError(self._problem)
        return len(told)

    async def _tell(self, request: SettleRequest) -> bool:
        try:
            await self._ledger.settle(request)
        except CallerError as error:
            # The lease ended first and the books have decided; saying it again changes nothing.
            log.warning("the ledger refused a settlement", problem=str(error))
        except StoreError as error:
            # The others are told all the same: one that cannot be must not stand before them.
            self._problem = str(error)
            return False
        return True
