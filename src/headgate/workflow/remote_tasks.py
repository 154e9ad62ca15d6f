"""Sending steps to a service: in batches, each under a key, each once.

A batch is in the journal before it is on its way, with its bytes: whoever does not hear the answer
sends the same bytes under the same key, and the service answers as it did. A service without room
for all says for which; those go again under another key, in small batches until it has room.

Rule: an order is either with the service, or ended, or nothing of it was taken. Where nobody can
tell, it has failed and says so; it is never sent anew by itself.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import msgspec

from headgate.api.schema.tasks import BatchEntryBody, SubmittedBatchBody, WhyBody
from headgate.client.client import Client
from headgate.client.requests import IDEMPOTENCY_KEY, TaskFields, shared_by, task_body
from headgate.core.events import LAST_RANK, EventKind, TaskEvent, rank_of
from headgate.core.idempotency import KEPT_SECONDS
from headgate.core.money import plain_usd, to_limit_micro_usd
from headgate.core.retries import Backoff
from headgate.core.task import TERMINAL, TaskStatus
from headgate.core.task_view import TaskSnapshot, TaskUsageBody
from headgate.errors import (
    NotAllowedError,
    RequestRefusedError,
    ServiceError,
    ServiceLimitError,
    ServiceUnavailableError,
    WorkflowError,
)
from headgate.executors.targets import GATEWAY_NAME
from headgate.workflow.backend import STATES, StepOrder, StepTask, TaskListener, TaskState
from headgate.workflow.config import BUILT_IN, PATHS, Kind
from headgate.workflow.remote_journal import (
    Ended,
    Journal,
    Sent,
    SentOrder,
    Taken,
    Unfinished,
    queued_task,
)
from headgate.workflow.step_requests import ModelRequest, Request, TargetRequest, is_truncated
from headgate.workflow.workflow import (
    CallWork,
    CommandWork,
    Endpoint,
    HttpWork,
    ModelWork,
    StepItems,
    TargetWork,
    Workflow,
)

# Between runs of steps and tasks of a service: what is sent for one, and what is read of one.
#
# Nothing here asks anybody. Rule: every task says by its labels which run and which step it is
# of, so that people find and cancel the tasks of a run with no more than its id.

BATCH_TASKS = 50
BATCH_BYTES = 512 * 1024
"""A service takes twice that; a task that is larger by itself is sent alone, for it to judge."""

PATIENCE = timedelta(days=30)
"""How long a task may wait and run in all; its attempts end by their own timeout."""

_KEYS: dict[type[Any], str] = {
    CommandWork: "command",
    HttpWork: "http",
    CallWork: "call",
}
_ACTIONS = {kind: path.removeprefix("/v1").lstrip("/") for kind, path in PATHS.items()}
"""What the gateway is asked for an endpoint of a kind."""

_ONLY_NAMED = "a service runs only what its configuration names"
_TARGET = "name a target there (of kind http, command, callable or pull) and say `target: NAME`"
_SHOWN_TARGETS = 20
_WINDOWED = ("global_budget", "project_budget")


class SharedFields(NamedTuple):
    """What all tasks of a run have in common; without an agent of its own a step has this one.

    `kinds` are those of the endpoints of models, by their names.
    """

    run_id: str
    workflow: str
    scope: str
    agent_id: str
    project_id: str | None = None
    kinds: Mapping[str, Kind] = {}


class Parcel(NamedTuple):
    """One run of a step, ready to be sent."""

    order: SentOrder
    body: dict[str, object]
    size_bytes: int


def check_for_service(workflow: Workflow, file: str) -> None:
    """Refuse a workflow with a step that only runs on the machine of whoever starts it."""
    for index, step in enumerate(workflow.steps):
        match step.work:
            case TargetWork():
                continue
            case ModelWork(endpoint=name):
                problem = _endpoint_problem(workflow.endpoints[name])
                key = "endpoint"
            case work:
                problem = f"{_ONLY_NAMED}; {_TARGET}"
                key = _KEYS[type(work)]
        if problem:
            raise WorkflowError(
                file,
                f"step '{step.id}': {problem}, or run it without --server",
                line=step.line,
                key=f"steps[{index}].{key}",
            )


def _endpoint_problem(endpoint: Endpoint) -> str:
    """Say why a service cannot ask an endpoint; its own key there is not needed."""
    built_in = BUILT_IN[endpoint.kind]
    if endpoint.url == built_in.url and not endpoint.headers:
        return ""
    part = "headers" if endpoint.url == built_in.url else "a url"
    known = " or ".join(BUILT_IN)
    return (
        f"endpoint '{endpoint.name}' has {part} of its own, and a service asks only the upstreams"
        f" of its configuration; say `endpoint: {known}`"
    )


def check_targets(workflow: Workflow, known: Sequence[str]) -> None:
    """Refuse a workflow with a target that the service does not have."""
    for step in workflow.steps:
        name = step.work.target if isinstance(step.work, TargetWork) else None
        if name is not None and name not in known:
            there = ", ".join(sorted(known)[:_SHOWN_TARGETS]) or "none"
            line = f"step '{step.id}': unknown target '{name}'; {_ONLY_NAMED}: {there}"
            raise RequestRefusedError(line, code="unknown_target")
        if isinstance(step.work, ModelWork) and GATEWAY_NAME not in known:
            line = f"step '{step.id}': this service is too old to call models; update it"
            raise RequestRefusedError(line, code="unknown_target")


def needed_steps(workflow: Workflow) -> frozenset[str]:
    """Return the steps whose results a later one may ask for."""
    counterparts = (step.foreach for step in workflow.steps)
    named = {items.step for items in counterparts if isinstance(items, StepItems)}
    return frozenset(named.union(*(step.depends_on for step in workflow.steps)))


def parcel_of(order: StepOrder, sender: SharedFields, *, is_needed: bool, now: datetime) -> Parcel:
    """Return what is sent for one run of a step."""
    step = order.step
    fields: TaskFields = {
        **_work(order.request, sender.kinds),
        "agent_id": step.agent or sender.agent_id,
        "project_id": sender.project_id,
        "priority": step.priority or None,
        "weight": step.weight,
        "max_attempts": step.retries + 1,
        "timeout_seconds": step.timeout_seconds,
        "deadline": now + PATIENCE,
        "estimate_tokens": order.tokens,
        "scopes": (sender.scope,),
        "labels": {
            **step.labels,
            "run": sender.run_id,
            "workflow": sender.workflow,
            "step": step.id,
        },
    }
    if step.cost_micro_usd is not None:
        fields["cost_usd"] = plain_usd(step.cost_micro_usd)
    elif order.micro_usd is not None:
        fields["estimate_usd"] = plain_usd(order.micro_usd)
    body = task_body(fields)
    sent = SentOrder(
        number=order.number,
        generation=order.generation,
        is_needed=is_needed,
        is_provisional=order.is_provisional,
    )
    return Parcel(sent, body, len(msgspec.json.encode(body)))


def batch_size(parcels: Sequence[Parcel], most: int) -> int:
    """Return how many of these go into the next request: few, and not too large together."""
    size_bytes = 0
    for count, parcel in enumerate(parcels):
        size_bytes += parcel.size_bytes
        if count == most or (count and size_bytes > BATCH_BYTES):
            return count
    return len(parcels)


def batch_body(parcels: Sequence[Parcel]) -> msgspec.Raw:
    """Return the bytes of a request, which stay the same however often it is sent."""
    bodies = [parcel.body for parcel in parcels]
    return msgspec.Raw(msgspec.json.encode({**shared_by(bodies), "tasks": bodies}))


def task_of(snapshot: TaskSnapshot, before: StepTask) -> StepTask:
    """Return what a service says of the task of a step."""
    used = snapshot.usage or TaskUsageBody()
    return StepTask(
        number=before.number,
        generation=before.generation,
        task_id=before.task_id,
        state=STATES[snapshot.state],
        attempt=snapshot.attempt,
        started_at=_seconds(snapshot.started_at),
        completed_at=_seconds(snapshot.completed_at),
        error=snapshot.error,
        tokens=used.tokens or 0,
        micro_usd=to_limit_micro_usd(used.usd or 0),
        assumed_micro_usd=to_limit_micro_usd(used.assumed_usd or 0),
        is_unpriced=snapshot.unpriced,
        is_truncated=snapshot.target == GATEWAY_NAME and is_truncated(snapshot.result),
        is_provisional=before.is_provisional,
    )


def moved_task(task: StepTask, event: TaskEvent) -> StepTask:
    """Return a task that has moved on and not ended, as an event tells."""
    state = STATES[event.state or TaskStatus.QUEUED]
    changed: dict[str, Any] = {"state": state, "attempt": event.attempt or task.attempt}
    if state is TaskState.RUNNING:
        changed["started_at"] = event.time.timestamp()
    return msgspec.structs.replace(task, **changed)


def gone_task(task: StepTask, ending: TaskEvent | None, *, is_needed: bool) -> StepTask:
    """Return how a task ended that the service no longer has, as far as anybody can know.

    Its end may have been heard of, and then only the result is lost. Otherwise it may have been
    done, so it is not begun anew before somebody has decided that.
    """
    state = TaskState.FAILED if ending is None else STATES[ending.state or TaskStatus.FAILED]
    error = None if ending is None else ending.error
    if ending is None:
        error = f"the service no longer has task {task.task_id}, and nobody knows whether it was"
        error += " done; look at what it was to do, then resume the run, which begins it anew"
    elif state is TaskState.DONE and is_needed:
        state = TaskState.FAILED
        error = f"task {task.task_id} was done, but the service has forgotten its result, which"
        error += " later steps need; raise task_retention_seconds or max_ended_tasks there, then"
        error += " resume the run"
    return msgspec.structs.replace(
        task,
        state=state,
        error=error,
        attempt=task.attempt if ending is None else ending.attempt or task.attempt,
        completed_at=None if ending is None else ending.time.timestamp(),
    )


def lost_task(order: SentOrder, sent_at: float) -> StepTask:
    """Return a task of which nobody knows whether the service took it."""
    when = datetime.fromtimestamp(sent_at, UTC)
    error = f"it was sent at {when:%Y-%m-%d %H:%M} UTC and no answer came, so nobody knows whether"
    error += " it was done; look at what it was to do, then resume the run, which begins it anew"
    return failed_task(order, error)


def failed_task(order: SentOrder, error: str) -> StepTask:
    """Return a task that the service does not have."""
    return StepTask(
        number=order.number,
        generation=order.generation,
        task_id="",
        state=TaskState.FAILED,
        error=error,
    )


def waits_for_window(why: WhyBody) -> bool:
    """Tell whether a task can only start when the window of a budget has moved on."""
    for reason in why.reasons:
        kind = reason.detail.get("reason")
        is_scope = kind == "gate_closed" and reason.detail.get("kind") == "scope"
        is_dated = (kind == "budget_short" or is_scope) and reason.until is not None
        is_held_back = bool(reason.held_by or reason.held_by_others)
        if (kind in _WINDOWED or is_dated) and not is_held_back:
            return True
    return False


def _work(request: Request, kinds: Mapping[str, Kind]) -> TaskFields:
    if isinstance(request, ModelRequest):
        action = _ACTIONS[kinds[request.endpoint]]
        return {"target": GATEWAY_NAME, "action": action, "input": request.body}
    assert isinstance(request, TargetRequest), request  # noqa: S101 - others were refused before
    return {
        "target": request.target,
        "action": request.action,
        "params": request.params,
        "input": request.input,
        "tab_id": request.tab_id,
        "selector": request.selector,
        "ref": request.ref,
        "slot": request.slot,
        "provider": request.provider,
    }


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


# Asking a service that may be away for a while: again and again, and saying so meanwhile.
#
# Rule: what may pass is waited out for ever, with waits that grow and differ; whoever wants to stop
# cancels. What is refused for good, such as a token that is not let in, is raised at once.

BACKOFF = Backoff(base_seconds=0.25, max_seconds=15.0)
LONGEST_WAIT_SECONDS = 60.0

Answered = TypeVar("Answered")


class Retrying:
    """What a run is waiting for at its service, in words."""

    def __init__(self) -> None:
        self._away = ""
        self._full = ""
        self._draws = random.Random()  # noqa: S311 - spreads load, no secret

    @property
    def trouble(self) -> str:
        """Why nothing goes on at the service, in one line; empty if nothing is wrong."""
        return self._away or self._full

    async def ask(self, call: Callable[[], Awaitable[Answered]]) -> Answered:
        """Ask until there is an answer, or a refusal that stays one."""
        tries = 0
        while True:
            try:
                answer = await call()
            except ServiceError as error:
                if not may_pass(error):
                    raise
                tries += 1
                self._away = f"the service does not answer, and is asked again: {error}"
                await asyncio.sleep(self._pause_seconds(tries, error.retry_after_seconds))
            else:
                self._away = ""
                return answer

    def has_room(self) -> None:
        """Note that the service takes tasks."""
        self._full = ""

    async def wait_for_room(self, tries: int, why: str, ended: asyncio.Event) -> None:
        """Wait until the service may have room again: a task has ended, or some time is over."""
        self._full = f"the service takes no more tasks now, and is asked again: {why}"
        ended.clear()
        try:
            async with asyncio.timeout(self._pause_seconds(tries, None)):
                await ended.wait()
        except TimeoutError:
            return

    def _pause_seconds(self, tries: int, wanted_seconds: float | None) -> float:
        drawn = BACKOFF.seconds(tries, draw=self._draws.random())
        return min(max(drawn, wanted_seconds or 0.0), LONGEST_WAIT_SECONDS)


def may_pass(error: ServiceError) -> bool:
    """Tell whether asking again can help; what is no Headgate service does not become one."""
    passes = isinstance(error, ServiceUnavailableError | ServiceLimitError)
    return passes and error.code != "bad_answer"


# The tasks of a run that a service has: what events tell of them, and looks for what is missed.
#
# An event says that something happened, and looking says what is so; the end of a task counts
# when it is in the journal, with the result, and is told then and once. Events may be missed
# while the stream breaks, so every task is looked at now and then.
#
# Rule: a task that moves on is told in its order, whatever order the news come in.

LOOKERS = 8
FIRST_LOOK_SECONDS = 5.0
LOOK_SECONDS = 30.0
PACE_SECONDS = 1.0
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0
MAX_EARLY = 10_000
"""How much is kept of tasks whose id is not known yet: as much as a service keeps of events."""

NEWS = ",".join(kind.value for kind in EventKind if kind not in (EventKind.QUEUED, EventKind.RESET))
_FROM_NOW = "-"
"""No service knows such an event, so that the stream begins with a reset: it is there then."""


class Tracked(msgspec.Struct):
    """A task that has not ended, as it was last told; `ending` is the event of its end."""

    task: StepTask
    is_needed: bool
    look_at: float
    rank: int = 0
    is_asked: bool = False
    is_ending: bool = False
    ending: TaskEvent | None = None


class RemoteWatch:
    """Follows the tasks of one run."""

    def __init__(self, client: Client, retrying: Retrying, journal: Journal) -> None:
        self._client = client
        self._retrying = retrying
        self._journal = journal
        self._tracked: dict[str, Tracked] = {}
        self._early: dict[str, TaskEvent] = {}
        self._asked: asyncio.Queue[str] = asyncio.Queue()
        self._loops: list[asyncio.Task[None]] = []
        self._is_connected = asyncio.Event()
        self._fault: Exception | None = None
        self.listener: TaskListener | None = None
        self.sending = 0
        """How many batches are on their way: events may come before the ids of their tasks."""
        self.ended = asyncio.Event()
        """Is set when a task has ended."""

    def tasks(self) -> list[StepTask]:
        """Return the tasks that have not ended."""
        return [tracked.task for tracked in self._tracked.values()]

    def check(self) -> None:
        """Raise what keeps the run from going on at all, such as a token that was revoked."""
        if self._fault is not None:
            raise self._fault

    async def start(self) -> None:
        """Listen from now on; a stream that does not come about in time is waited for no longer."""
        for loop in (self._follow(), self._look(), *(self._answer() for _ in range(LOOKERS))):
            self._loops.append(asyncio.create_task(self._guarded(loop)))
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._is_connected.wait()
        except TimeoutError:
            return

    def add(self, task: StepTask, *, is_needed: bool) -> None:
        """Follow a task that was taken."""
        look_at = time.monotonic() + FIRST_LOOK_SECONDS
        tracked = Tracked(task=task, is_needed=is_needed, look_at=look_at)
        self._tracked[task.task_id] = tracked
        early = self._early.pop(task.task_id, None)
        if early is not None:
            self._heard(tracked, early)
        if self._fault is not None:
            self._give_up(task)

    def has_sent(self) -> None:
        """Note that a batch was answered; without one on its way no event can be too early."""
        self.sending -= 1
        if not self.sending:
            self._early.clear()

    async def look_at(self, unfinished: Sequence[Unfinished]) -> None:
        """Follow tasks of an earlier process, after a look at how each of them stands now."""
        permits = asyncio.Semaphore(LOOKERS)

        async def look(task: StepTask) -> None:
            async with permits:
                await self._look_up(task.task_id)

        for task, is_needed in unfinished:
            # Some may be followed already: a batch without an answer was sent again before.
            if task.task_id not in self._tracked:
                self.add(task, is_needed=is_needed)
        await asyncio.gather(*(look(task) for task, _ in unfinished))
        self.check()

    async def until_quiet(self, ends_at: Callable[[], float]) -> None:
        """Wait until all tasks have ended, or until a time of the event loop, which may move."""
        now = asyncio.get_running_loop().time
        while self._tracked and self._fault is None and now() < ends_at():
            self.ended.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(ends_at()):
                    await self.ended.wait()

    async def stop(self) -> None:
        """Listen no more; what is known to have ended is written down first, if that goes soon."""
        try:
            if self._fault is None and not self._retrying.trouble:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._asked.join()
        except TimeoutError:
            pass
        finally:
            for loop in self._loops:
                loop.cancel()
            await asyncio.gather(*self._loops, return_exceptions=True)
            self._loops.clear()

    async def _guarded(self, loop: Coroutine[Any, Any, None]) -> None:
        try:
            await loop
        except Exception as error:  # noqa: BLE001 - whoever asks next is told, and the run ends
            self._is_connected.set()
            self.ended.set()
            if self._fault is None:
                self._fault = error
                for task in self.tasks():
                    self._give_up(task)

    def _give_up(self, task: StepTask) -> None:
        """Tell of a task that nobody can follow any more; the journal knows that it goes on."""
        error = f"the service cannot be asked about it any more: {self._fault}"
        failed = msgspec.structs.replace(task, state=TaskState.FAILED, error=error)
        self.tell(failed)

    async def _follow(self) -> None:
        while True:
            events = self._client.events(
                kind=NEWS, last_event_id=_FROM_NOW, patience_seconds=math.inf
            )
            async for event in events:
                self._hear(event)

    def _hear(self, event: TaskEvent) -> None:
        if event.kind is EventKind.RESET:
            self._is_connected.set()
            for each in self._tracked.values():
                self._ask(each)
            return
        tracked = self._tracked.get(event.task_id)
        if tracked is not None:
            self._heard(tracked, event)
        elif self.sending:
            self._keep(event)

    def _keep(self, event: TaskEvent) -> None:
        before = self._early.pop(event.task_id, None)
        is_older = before is not None and _rank(before) > _rank(event)
        self._early[event.task_id] = before if is_older and before is not None else event
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]

    def _heard(self, tracked: Tracked, event: TaskEvent) -> None:
        if event.state in TERMINAL:
            tracked.ending = event
            self._ask(tracked)
        elif event.state is not None:
            self._move(tracked, _rank(event), moved_task(tracked.task, event))

    def _move(self, tracked: Tracked, rank: int, task: StepTask) -> None:
        if rank > tracked.rank and not tracked.is_ending:
            tracked.rank, tracked.task = rank, task
            self.tell(task)

    def _ask(self, tracked: Tracked) -> None:
        if not (tracked.is_asked or tracked.is_ending):
            tracked.is_asked = True
            self._asked.put_nowait(tracked.task.task_id)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(PACE_SECONDS)
            now = time.monotonic()
            for tracked in self._tracked.values():
                if tracked.look_at <= now:
                    tracked.look_at = now + LOOK_SECONDS
                    self._ask(tracked)

    async def _answer(self) -> None:
        while True:
            task_id = await self._asked.get()
            try:
                await self._look_up(task_id)
            finally:
                self._asked.task_done()

    async def _look_up(self, task_id: str) -> None:
        tracked = self._tracked.get(task_id)
        if tracked is None:
            return
        tracked.is_asked = False
        snapshot = await self._retrying.ask(lambda: self._snapshot(task_id))
        if snapshot is None:
            gone = gone_task(tracked.task, tracked.ending, is_needed=tracked.is_needed)
            await self._end(tracked, gone, None)
        elif snapshot.state in TERMINAL:
            await self._end(tracked, task_of(snapshot, tracked.task), snapshot.result)
        else:
            rank = rank_of(snapshot.state, snapshot.attempt)
            self._move(tracked, rank, task_of(snapshot, tracked.task))

    async def _snapshot(self, task_id: str) -> TaskSnapshot | None:
        try:
            return await self._client.get(task_id)
        except RequestRefusedError as error:
            if error.code in ("not_found", "task_deleted"):
                return None
            raise

    async def _end(self, tracked: Tracked, task: StepTask, result: object) -> None:
        # Two looks at one task may both see its end; the first one tells it. Until it is written
        # down it is among the tasks that have not ended, so at no moment is it unknown.
        if not tracked.is_ending:
            tracked.is_ending = True
            await self._journal.write(
                Ended(task=task, result=msgspec.Raw(msgspec.json.encode(result)))
            )
            del self._tracked[task.task_id]
            self.ended.set()
            self.tell(task)

    def tell(self, task: StepTask) -> None:
        """Tell of a change, if somebody listens."""
        if self.listener is not None:
            self.listener(task)


def _rank(event: TaskEvent) -> int:
    if event.state in TERMINAL:
        return LAST_RANK
    return rank_of(event.state or TaskStatus.QUEUED, event.attempt or 0)


class _Settled(NamedTuple):
    """What became of each task of a batch, and why some of them are to be sent again."""

    entries: list[BatchEntryBody]
    why: str


RESENT_SECONDS = KEPT_SECONDS - 3_600.0
"""How old a batch may be that is sent again: the service must know its key still."""

_ADVICE = {"unknown_target": "a service runs only what its configuration names"}


class RemoteSubmitter:
    """Sends the steps of one run.

    What was sent is answered even if nobody waits for it any more: whoever submits may be
    cancelled at any moment, and the service has the tasks all the same.
    """

    def __init__(
        self, client: Client, retrying: Retrying, journal: Journal, watch: RemoteWatch
    ) -> None:
        self._client = client
        self._retrying = retrying
        self._journal = journal
        self._watch = watch
        self._most = BATCH_TASKS
        self._under_way: dict[str, asyncio.Task[_Settled]] = {}

    @property
    def under_way(self) -> Set[str]:
        """The keys of the batches whose answers are on their way."""
        return self._under_way.keys()

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
                await self._retrying.wait_for_room(tries, why, self._watch.ended)
        self._retrying.has_room()

    async def take_up(self) -> None:
        """Send again what an earlier process got no answer to; the service knows what it took."""
        for sent in list(self._journal.pending.values()):
            if time.time() - sent.at < RESENT_SECONDS:
                await self._settled(sent)
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
        self._watch.sending += 1
        try:
            entries, why = await self._settled(sent)
        finally:
            self._watch.has_sent()
        if any(entry.code is None for entry in entries):
            self._retrying.has_room()
        self._most = 1 if why else min(BATCH_TASKS, 2 * self._most)
        return [one for one, entry in zip(batch, entries, strict=True) if entry.retryable], why

    async def until_answered(self, ends_at: Callable[[], float]) -> None:
        """Wait until nothing is on its way, or until a time of the event loop, which may move."""
        now = asyncio.get_running_loop().time
        while self._under_way and now() < ends_at():
            await asyncio.wait(self._under_way.values(), timeout=ends_at() - now())

    async def stop(self) -> None:
        """Wait for no answer any more."""
        left = list(self._under_way.values())
        for exchange in left:
            exchange.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _settled(self, sent: Sent) -> _Settled:
        """Send a batch until it is answered; a cancel ends that, but not an exchange begun."""

        async def once() -> _Settled:
            exchange = asyncio.create_task(self._exchange(sent))
            self._under_way[sent.key] = exchange
            exchange.add_done_callback(lambda _: self._under_way.pop(sent.key))
            return await asyncio.shield(exchange)

        return await self._retrying.ask(once)

    async def _exchange(self, sent: Sent) -> _Settled:
        """Send a batch once, and settle what the service answers."""
        if sent.key not in self._journal.pending:
            await self._journal.write(sent)
        self._watch.sending += 1
        try:
            entries = await self._answer(sent)
            return _Settled(entries, await self._settle(sent, entries))
        finally:
            self._watch.has_sent()

    async def _answer(self, sent: Sent) -> list[BatchEntryBody]:
        """Return what became of each task of a batch."""
        try:
            answer = await self._post(sent)
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

    async def _post(self, sent: Sent) -> SubmittedBatchBody:
        return await self._client.request(
            "POST",
            "/tasks/batch",
            response_type=SubmittedBatchBody,
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
