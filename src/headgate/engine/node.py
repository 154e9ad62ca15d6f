"""The node: this process among those that share a store.

It shows signs of life, stands for election, and fetches what it is told to run. While its event
loop is busy, whoever writes for it renews its leases. A node has one life. If others took its
tasks, because its lease had ended, it drops them, and comes back under a new name. One that is late
goes on if nobody did. One that leaves dispatches until another node can: calls of its own tasks
have to be decided.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf

import structlog

from headgate.engine.dispatcher import Dispatcher
from headgate.engine.task_runner import TaskRunner
from headgate.errors import StoreError, StoreUnavailableError
from headgate.storage.store import DISPATCHER, Life, Node, TaskStore

log = structlog.get_logger("headgate.node")

DISPATCHER_LEASE_SECONDS = 3.0
BEATS_PER_LEASE = 4
SOLE_BEAT_SECONDS = 2.0
"""Nobody waits for the signs of a sole process; they only show whether the store answers."""

RETRY_SECONDS = 0.5
SILENT_SECONDS = 2.0
"""When a store that neither answers nor fails is told of as a problem."""

MakeId = Callable[[], str]


class NodeLife:
    """Keeps this process alive in the store, and leading if it can."""

    def __init__(
        self,
        store: TaskStore,
        runner: TaskRunner,
        dispatcher: Dispatcher,
        *,
        capacity: int,
        lease_seconds: float,
        make_id: MakeId = lambda: uuid.uuid4().hex,
    ) -> None:
        self._store = store
        self._runner = runner
        self._dispatcher = dispatcher
        self._capacity = capacity
        self._lease_seconds = lease_seconds
        self._is_leaving = False
        self._has_heir = False
        self._has_ended = False
        self.address = ""
        self._make_id = make_id
        self._has_orders = asyncio.Event()
        self.node_id = ""
        self.leader_id = ""
        self.leader_address = ""
        self._failure = ""
        self._asked_at: float | None = None

    @property
    def problem(self) -> str:
        """What keeps this node from its work: the store fails, or has not answered for long."""
        if self._failure or self._asked_at is None:
            return self._failure
        silent_seconds = asyncio.get_running_loop().time() - self._asked_at
        if silent_seconds < SILENT_SECONDS:
            return ""
        return f"the store has not answered for {silent_seconds:.0f} seconds"

    async def begin(self) -> None:
        """Join under a new name, and stand for election."""
        self.node_id = self._make_id()
        node = Node(id=self.node_id, capacity=self._capacity, address=self.address)
        await self._store.join(node, lease_seconds=self._lease_seconds)
        self._store.watch(self.node_id, self._has_orders.set)
        self._store.watch(DISPATCHER, self._dispatcher.refresh)
        await self._elect()

    async def run(self) -> None:
        """Beat, elect and collect until cancelled."""
        pause = SOLE_BEAT_SECONDS
        if self._store.is_shared:
            pause = min(self._lease_seconds, DISPATCHER_LEASE_SECONDS) / BEATS_PER_LEASE
        loop = asyncio.get_running_loop()
        while True:
            await self._run_safely(self.run_once)
            next_at = loop.time() + pause
            while await self._has_orders_before(next_at):
                # Orders are not kept waiting for signs of life, each of which is a transaction.
                await self._run_safely(self.fetch)

    async def offer(self, capacity: int, *, lease_seconds: float) -> None:
        """Take another number of tasks from now on; a node that is leaving takes none."""
        if self._is_leaving:
            return
        before = self._capacity, self._lease_seconds
        self._capacity, self._lease_seconds = capacity, lease_seconds
        if not self.node_id or before == (capacity, lease_seconds):
            return
        # A store that cannot be asked now is told with the next sign of life.
        with suppress(StoreError):
            await self._store.beat(self.node_id, capacity=capacity, lease_seconds=lease_seconds)
        self._dispatcher.refresh()

    async def run_once(self) -> None:
        """Show one sign of life, and do what this node is told."""
        self._has_orders.clear()
        if not self.node_id:
            await self.begin()
        self._show_life()
        await self._beat()
        await self._elect()
        await self._collect()

    async def fetch(self) -> None:
        """Do what this node is told; whether it is alive still, the next sign of life tells."""
        self._has_orders.clear()
        if self.node_id:
            await self._collect()

    async def begin_to_leave(self) -> None:
        """Take no more tasks, and dispatch no more as soon as another node can."""
        self._is_leaving = True
        if self.node_id:
            await self._beat()

    async def end(self) -> None:
        """Take no more tasks and dispatch no more; what runs is drained by the runner."""
        self._capacity = 0
        self._is_leaving = self._has_ended = True
        self._dispatcher.step_down()
        if self.node_id:
            await self._store.beat(self.node_id, capacity=0, lease_seconds=self._lease_seconds)
        await self._resign()

    async def _beat(self) -> None:
        """Show a sign of life; one that leaves resigns if another node can dispatch."""
        is_leaving = self._is_leaving
        beat = await self._store.beat(
            self.node_id,
            capacity=self._capacity,
            lease_seconds=self._lease_seconds,
            is_leaving=is_leaving,
        )
        if not beat.is_alive:
            await self._come_back()
        elif is_leaving:
            self._has_heir = beat.has_heir
            if beat.has_heir and self._dispatcher.is_leading:
                await self._resign()

    async def _resign(self) -> None:
        self._dispatcher.step_down()
        # Whoever dispatches next counts them from the start.
        await self._dispatcher.note_calls()
        if self.node_id:
            await self._store.resign(self.node_id)

    async def leave(self) -> None:
        """Go, with nothing left behind, so that nobody has to wait for a lease to end."""
        self._dispatcher.step_down()
        self._store.unwatch()
        self._store.keep_alive(None)
        if self.node_id:
            await self._store.resign(self.node_id)
            await self._store.leave(self.node_id)

    def _show_life(self) -> None:
        """Have the leases renewed that this loop would renew if it were not busy."""
        self._store.keep_alive(
            Life(
                node_id=self.node_id,
                lease_seconds=self._lease_seconds,
                epoch=self._dispatcher.epoch if self._capacity else None,
                dispatcher_lease_seconds=DISPATCHER_LEASE_SECONDS,
            )
        )

    async def _has_orders_before(self, at: float) -> bool:
        if asyncio.get_running_loop().time() >= at:
            # However many orders come, the next sign of life is due.
            return False
        try:
            async with asyncio.timeout_at(at):
                await self._has_orders.wait()
        except TimeoutError:
            return False
        return True

    async def _run_safely(self, work: Callable[[], Awaitable[None]]) -> None:
        self._asked_at = asyncio.get_running_loop().time()
        try:
            await work()
            self._failure = ""
        except StoreUnavailableError as error:
            if self._failure != str(error):
                log.warning("the store is unavailable", problem=str(error))
            self._failure = str(error)
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._asked_at = None

    async def _come_back(self) -> None:
        log.warning("others took the tasks of this node", node_id=self.node_id)
        self._dispatcher.step_down()
        self._runner.abandon()
        await self.begin()

    async def _elect(self) -> None:
        asked_at = asyncio.get_running_loop().time()
        election = await self._store.elect(self.node_id, lease_seconds=DISPATCHER_LEASE_SECONDS)
        self.leader_id, self.leader_address = election.node_id, election.address
        # One that resigns may have asked before it did.
        may_lead = self._capacity and not (self._has_heir or self._has_ended)
        if election.node_id == self.node_id and may_lead:
            # The lease began when the store was asked, or later.
            until = asked_at + DISPATCHER_LEASE_SECONDS if self._store.is_shared else inf
            self._dispatcher.become_leader(self.node_id, election.epoch, until=until)
        else:
            self._dispatcher.follow(election.node_id, election.epoch)

    async def _collect(self) -> None:
        collected = await self._store.collect(self.node_id)
        for record in collected.started:
            self._runner.start(record)
        for task_id in collected.cancelled:
            self._runner.cancel(task_id)
