"""The loops behind a screen: one asks what is shown, one listens whether anything happens.

While events are heard of, what is shown is asked for every few seconds, and otherwise seldom.
Without a stream of events it is asked for every few seconds anyway. Rule: all requests together
keep to one rate, and an error changes what is said, never whether the loops go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

import msgspec

from headgate.api.schema.admin import ProjectStatusText
from headgate.api.schema.calls import CallListBody, CallWhyBody
from headgate.cli.top.service_state import (
    LIVE_CALLS,
    MAX_CALLS,
    MAX_UPSTREAMS,
    PAUSE_SECONDS,
    RUNNING_STATES,
    WAITING_STATES,
    ConnectionState,
    Question,
    QuestionSchedule,
    ServiceState,
    ShownTasks,
    Throttle,
    Topic,
    UpstreamCalls,
    calls_by_upstream,
    query_of_tasks,
)
from headgate.client.client import Client
from headgate.client.responses import NO_RESPONSE, NOT_REACHED
from headgate.core.events import TaskEvent
from headgate.core.retries import Backoff
from headgate.errors import RequestRefusedError, ServiceError, ServiceUnavailableError

LIVELY_SECONDS = {Topic.BUDGETS: 5.0, Topic.SLOTS: 10.0, Topic.CALLS: 10.0, Topic.WHY: 10.0}
OTHERS_LIVELY_SECONDS = 2.0
MONEY_SECONDS = 10.0
"""How often budgets are asked for where only their total is seen."""
QUIET_SECONDS = 10.0
REFUSED_SECONDS = 60.0
LISTEN_AGAIN_SECONDS = 5.0
MAX_REASONS_A_TURN = 8
REASONS_SECONDS = 0.25
"""Rows without a reason share a turn, one asked after the other, until it has taken so long."""
MAX_EVENTS_A_SECOND = 50
TOO_MANY_SECONDS = 60.0
"""A stream that tells of more is closed for so long: asking every few seconds tells as much."""

NO_GOOD_TOKEN = 401

_AWAY = Backoff(base_seconds=1.0, max_seconds=10.0, spread=0.0)
_AWAY_WORDS = {NOT_REACHED: "no service answers", NO_RESPONSE: "the service gave no answer"}
_STATS = Question(Topic.STATS)
_MONEY = Question(Topic.BUDGETS)


class ScreenContent(msgspec.Struct, frozen=True, kw_only=True):
    """What a screen shows: topics, the tasks whose reasons are seen, and a text to look for."""

    topics: tuple[Topic, ...] = ()
    waiting: tuple[str, ...] = ()
    wanted: str = ""


class Watcher:
    """Keeps the state of a service as it is; `changed` is called whenever it is another."""

    def __init__(
        self,
        client: Client,
        changed: Callable[[], None] = lambda: None,
        *,
        pause_seconds: float = PAUSE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = ServiceState()
        self.content = ScreenContent()
        self.throttle = Throttle(pause_seconds, clock=clock)
        self.is_listening = False
        self._client = client
        self._changed = changed
        self._clock = clock
        self._schedule = QuestionSchedule()
        self._heard_at = clock()
        self._failures = 0
        self._refused: set[Topic] = set()

    async def ask_forever(self) -> None:
        """Ask whatever is due, one thing after the other."""
        while True:
            await self.throttle.turn()
            await self.ask_turn()

    async def listen_forever(self) -> None:
        """Listen to what happens; where that fails, try again after a while."""
        while True:
            await self.throttle.turn()
            await asyncio.sleep(await self.listen_once())

    def show(self, content: ScreenContent) -> None:
        """Ask from now on for something else."""
        if content.wanted != self.content.wanted:
            self.service.running = self.service.waiting = None
            self._schedule.forget(Topic.RUNNING)
            self._schedule.forget(Topic.WAITING)
        self.content = content

    def note_gone(self, task_id: str) -> None:
        """Show a task no longer that was just cancelled, and have the lists asked for again."""
        service = self.service
        service.running = _without(service.running, task_id)
        service.waiting = _without(service.waiting, task_id)
        self.ask_again(Topic.RUNNING, Topic.WAITING, Topic.STATS)

    def note_status(self, project_id: str, status: ProjectStatusText) -> None:
        """Show what a project was just made, and have the projects asked for again."""
        if self.service.projects is not None:
            changed = [
                msgspec.structs.replace(one, status=status) if one.id == project_id else one
                for one in self.service.projects.projects
            ]
            self.service.projects = msgspec.structs.replace(self.service.projects, projects=changed)
        self.ask_again(Topic.PROJECTS, Topic.STATS)

    def ask_again(self, *topics: Topic) -> None:
        """Have something asked at the next turn, since it was just changed."""
        for topic in topics:
            self._schedule.forget(topic)

    async def ask_turn(self) -> None:
        """Ask what one turn is for: one question, or the reasons of several rows without any."""
        until = self._clock() + REASONS_SECONDS
        for _ in range(MAX_REASONS_A_TURN):
            question = await self.ask_once()
            is_reason = question is not None and question.topic is Topic.WHY
            if not is_reason or not self._lacks_reasons() or self._clock() > until:
                return

    def _lacks_reasons(self) -> bool:
        return any(task_id not in self.service.reasons for task_id in self.content.waiting)

    async def ask_once(self) -> Question | None:
        """Ask the one question that is most overdue, if one is due."""
        question = self._schedule.next(self._wanted(), self._clock())
        self._forget_reasons()
        if question is None:
            return None
        began = self._clock()
        has_answer = await self._is_answered(question)
        # How long nobody answered says nothing about how long an answer takes.
        self._schedule.note(question, began, self._clock() if has_answer else began)
        self._changed()
        return question

    async def _is_answered(self, question: Question) -> bool:
        try:
            await self._ask(question)
        except ServiceError as error:
            self._note_error(question, error)
            return not isinstance(error, ServiceUnavailableError)
        self._note_answer(question)
        return True

    def _forget_reasons(self) -> None:
        """Keep the reasons that were asked for lately: rows are left, and looked at again."""
        reasons, asked_at = self.service.reasons, self._schedule.asked_at
        for task_id in [one for one in reasons if asked_at(Question(Topic.WHY, one)) is None]:
            del reasons[task_id]

    async def listen_once(self) -> float:
        """Listen until the stream ends, and return how long to wait before another one."""
        self.is_listening = True
        try:
            return await self._listen()
        except RequestRefusedError:
            return REFUSED_SECONDS
        except ServiceError:
            return LISTEN_AGAIN_SECONDS
        finally:
            self.is_listening = False

    async def _listen(self) -> float:
        # Without patience a stream that cannot be had is an error at once, and so not believed in.
        stream = cast("AsyncGenerator[TaskEvent, None]", self._client.events(patience_seconds=0.0))
        # What happened before it began was not heard of, so that everything is asked once more.
        self._heard_at = self._clock()
        second, heard = self._heard_at, 0
        async with aclosing(stream) as events:
            async for _ in events:
                self._heard_at = self._clock()
                if self._heard_at - second >= 1:
                    second, heard = self._heard_at, 0
                heard += 1
                if heard > MAX_EVENTS_A_SECOND:
                    return TOO_MANY_SECONDS
        return LISTEN_AGAIN_SECONDS

    def _wanted(self) -> dict[Question, float]:
        if self.service.contact is ConnectionState.LOST:
            return {_STATS: _AWAY.seconds(self._failures, draw=0.0)}
        # The totals are always seen, and money is one of them.
        questions = [_STATS, *(Question(topic) for topic in self.content.topics), _MONEY]
        if Topic.WAITING in self.content.topics:
            questions += [Question(Topic.WHY, task_id) for task_id in self.content.waiting]
        return {one: self._seconds(one) for one in questions}

    def _seconds(self, question: Question) -> float:
        """Return how often something is asked: seldom where it is refused, or nothing happens."""
        if question.topic in self._refused:
            return REFUSED_SECONDS
        lively = LIVELY_SECONDS.get(question.topic, OTHERS_LIVELY_SECONDS)
        if question == _MONEY and Topic.BUDGETS not in self.content.topics:
            lively = MONEY_SECONDS
        asked_at = self._schedule.asked_at(question)
        if asked_at is None:
            return OTHERS_LIVELY_SECONDS
        is_quiet = self.is_listening and asked_at > self._heard_at
        return max(lively, QUIET_SECONDS) if is_quiet else lively

    async def _ask(self, question: Question) -> None:
        service = self.service
        match question.topic:
            case Topic.STATS:
                service.stats = await self._client.stats()
                service.throughput.add(service.stats, self._clock())
            case Topic.PROJECTS:
                service.projects = await self._client.list_projects()
            case Topic.LANES:
                service.lanes = await self._client.lanes()
            case Topic.RUNNING:
                await self._ask_tasks("running", RUNNING_STATES)
            case Topic.WAITING:
                await self._ask_tasks("waiting", WAITING_STATES)
            case Topic.WHY:
                service.reasons[question.task_id] = await self._client.why(question.task_id)
            case Topic.BUDGETS:
                service.budgets = await self._client.budget_status()
            case Topic.SLOTS:
                service.slots = await self._client.slots()
            case Topic.CALLS:
                service.calls = await self._ask_calls()

    async def _ask_calls(self) -> tuple[UpstreamCalls, ...]:
        """Return how calls stand, with the reasons of those that wait longest."""
        found = await self._client.request(
            "GET",
            "/calls",
            response_type=CallListBody,
            query={"state": LIVE_CALLS, "limit": MAX_CALLS},
        )
        rows = list(calls_by_upstream(found.calls))
        for place, row in enumerate(rows[:MAX_UPSTREAMS]):
            if row.longest is not None:
                rows[place] = msgspec.structs.replace(row, why=await self._why(row.longest.call_id))
        return tuple(rows)

    async def _why(self, call_id: str) -> CallWhyBody | str:
        path = f"/calls/{call_id}/why"
        try:
            return await self._client.request("GET", path, response_type=CallWhyBody)
        except RequestRefusedError as error:
            # It may have gone meanwhile.
            return str(error)

    async def _ask_tasks(self, name: str, states: str) -> None:
        wanted = self.content.wanted
        query = query_of_tasks(states, wanted)
        page = await self._client.request("GET", "/tasks", response_type=ShownTasks, query=query)
        if wanted == self.content.wanted:
            setattr(self.service, name, page)

    def _note_answer(self, question: Question) -> None:
        self.service.problems.pop(question.topic, None)
        self._refused.discard(question.topic)
        self._failures = 0
        self.service.contact = (
            ConnectionState.LIVE if self.is_listening else ConnectionState.POLLING
        )
        self.service.contact_problem = ""

    def _note_error(self, question: Question, error: ServiceError) -> None:
        is_away = error.status == 0 or question.topic is Topic.STATS
        if isinstance(error, ServiceUnavailableError) and is_away:
            self._failures += 1
            self.service.contact, self.service.contact_problem = ConnectionState.LOST, told(error)
        elif error.status == NO_GOOD_TOKEN:
            # All that is known stays as it was, reasons as well.
            self.service.contact = ConnectionState.REFUSED
            self.service.problems[question.topic] = str(error)
            self._refused.add(question.topic)
        elif question.topic is Topic.WHY:
            self.service.reasons[question.task_id] = str(error)
        else:
            self.service.problems[question.topic] = str(error)
            if isinstance(error, RequestRefusedError):
                self._refused.add(question.topic)


def told(error: ServiceError) -> str:
    """Return what a screen says of an error."""
    # The address stands in the first line, and a cause in the words of a library helps few.
    return _AWAY_WORDS.get(error.code, str(error))


def _without(page: ShownTasks | None, task_id: str) -> ShownTasks | None:
    if page is None:
        return None
    left = tuple(task for task in page.tasks if task.task_id != task_id)
    return msgspec.structs.replace(page, tasks=left)
