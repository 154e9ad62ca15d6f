"""A state machine that calls a task store and the plain model alike, and compares them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from headgate.core.admission import QueueLimits
from headgate.core.lifecycle import Finish, TryAgain, Usage
from headgate.core.retention import Retention
from headgate.core.task import MAX_LOSSES, OnParentFailure, TaskStatus, Terms
from headgate.storage.store import (
    Assigned,
    Expiration,
    Node,
    Queued,
    Settled,
    TaskQuery,
    TurnedAway,
)
from storage.scene import AWAY, HERE, Place, Scene
from storage.store_audit import audit
from storage.task_model import ENDED, ModelTask, TaskModel

Result = TypeVar("Result")
Draw = Callable[[Any], Any]

MAX_TASKS = 7
NOBODY = "t-nobody"
LIMITS = QueueLimits(max_queue=5, max_per_agent=3, queue_share=1, max_scheduled=3)
LIMIT_TOKENS = 1_500
FOR_EVER_SECONDS = 1e9

agents = st.sampled_from([None, "coder", "finder"])
projects = st.sampled_from(["search", "search", "evals"])
attempts_off = st.sampled_from([*[0] * 8, -1, 1])
ends = st.sampled_from(["done", "failed", "cancelled", None])
costs = st.sampled_from([0, 70, 150])


# One rule with these weights: the machine leaves out whole rules at random, and few tasks would
# ever come to their end.
ACTS = (
    *["submit"] * 5,
    *["assign"] * 5,
    *["settle"] * 5,
    *["join", "collect"] * 2,
    *["cancel", "drop", "die", "recover", "let_time_pass", "evict"],
)


async def _awaited(call: Callable[[], Awaitable[Result]]) -> Result:
    """Call within the event loop, as whoever asks the store does."""
    return await call()


class StoreMachine(RuleBasedStateMachine):
    """One store with a node that dispatches and another that comes and goes."""

    make_place: ClassVar[Callable[[], Place]]

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        place = type(self).make_place()
        self.clock = place.clock
        self.store = place.store()
        self.scene = Scene(place, self.store)
        self._lives = self._names = 0
        self.away = ""
        self.model = TaskModel(
            max_queue=5,
            max_per_agent=3,
            queue_share=1,
            max_scheduled=3,
            limit_tokens=LIMIT_TOKENS,
            nodes={HERE},
        )
        self.run(self._start())

    def run(self, step: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(step)

    async def _start(self) -> None:
        await self.store.open()
        await self.store.join(Node(id=HERE, capacity=9), lease_seconds=FOR_EVER_SECONDS)
        elected = await self.store.elect(HERE, lease_seconds=FOR_EVER_SECONDS)
        self.scene.epoch = elected.epoch
        await self.scene.set_limit("", LIMIT_TOKENS)

    def teardown(self) -> None:
        self.run(self.store.close())
        self._runner.close()

    @rule(act=st.sampled_from(ACTS), data=st.data())
    def act(self, act: str, data: st.DataObject) -> None:
        getattr(self, f"_{act}")(data.draw)

    def _submit(self, draw: Draw) -> None:
        name, agent_id, project_id = self._new_name(draw), draw(agents), draw(projects)
        known = st.sampled_from([*self.model.tasks, NOBODY])
        depends_on = tuple(draw(st.lists(known, max_size=2)))
        runs_anyway = draw(st.booleans())
        is_for_later = draw(st.sampled_from([False, False, True]))
        policy = OnParentFailure.RUN if runs_anyway else OnParentFailure.FAIL
        new = self.scene.new(
            name,
            agent_id=agent_id,
            project_id=project_id,
            depends_on=depends_on,
            terms=Terms(on_parent_failure=policy),
            limits=LIMITS,
            not_before=self.clock() + 10 if is_for_later else None,
        )
        answer = self.run(self.scene.ask(new))
        task = ModelTask(
            agent_id=agent_id,
            project_id=project_id,
            parents=depends_on,
            runs_anyway=runs_anyway,
            is_for_later=is_for_later,
        )
        expected = self.model.submit(name, task, self.clock())
        if expected == "unknown parent":
            assert not isinstance(answer, Queued | TurnedAway)
        elif expected == "rejected":
            assert isinstance(answer, TurnedAway)

    def _new_name(self, draw: Draw) -> str:
        """Choose an id that nobody had before, or one that comes again."""
        known = list(self.model.tasks)
        if len(known) >= MAX_TASKS or (known and draw(st.integers(0, 4)) == 0):
            again: str = draw(st.sampled_from(known))
            return again
        self._names += 1
        return f"t{self._names:04}"

    def _pick(self, draw: Draw, *states: str) -> str:
        """Choose a task, mostly one for which the step makes sense."""
        fitting = [name for name, task in self.model.tasks.items() if task.state in states]
        is_wild = not fitting or draw(st.integers(0, 9)) == 0
        name: str = draw(st.sampled_from([*self.model.tasks, NOBODY] if is_wild else fitting))
        return name

    def _assign(self, draw: Draw) -> None:
        name, off, is_here = self._pick(draw, "queued"), draw(attempts_off), draw(st.booleans())
        node_id = HERE if is_here else self.away or draw(st.sampled_from([HERE, AWAY]))
        is_here = node_id == HERE
        known = self.model.tasks.get(name)
        attempt = (known.attempt if known else 0) + 1 + off
        agent = (known and known.agent_id) or "helper"
        line = self.scene.line(name, attempt=attempt, node_id=node_id, agent_id=agent)
        (answer,) = self.run(self.scene.plan(line))
        is_new = known is not None and known.state == "queued"
        expected = self.model.assign(name, attempt, node_id, starts=is_here, agent=agent)
        if expected and is_new and known is not None:
            known.started_at = self.clock()
        assert isinstance(answer, Assigned) == expected

    def _join(self, _draw: Draw) -> None:
        if self.away:
            return
        self._lives += 1
        self.away = f"{AWAY}-{self._lives}"
        node = Node(id=self.away, capacity=9)
        self.run(self.store.join(node, lease_seconds=FOR_EVER_SECONDS))
        self.model.nodes.add(self.away)

    def _die(self, _draw: Draw) -> None:
        self.run(self.store.leave(self.away))
        self.model.nodes.discard(self.away)
        self.away = ""

    def _collect(self, _draw: Draw) -> None:
        collected = self.run(self.store.collect(self.away or AWAY))
        expected = self.model.collect(self.away or AWAY)
        for name in expected:
            self.model.tasks[name].started_at = self.clock()
        assert sorted(record.task.id for record in collected.started) == sorted(expected)

    def _settle(self, draw: Draw) -> None:
        name, off = self._pick(draw, "running"), draw(attempts_off)
        end, tokens = draw(ends), draw(costs)
        known = self.model.tasks.get(name)
        if known is not None and known.state == "assigned":
            # Whoever has not started a task has nothing to settle.
            return
        attempt = (known.attempt if known else 0) + off
        right = known.node_id or known.settled_by if known else None
        node_id = HERE if right is None else draw(st.sampled_from([right, right, right, HERE]))
        step: Finish | TryAgain = TryAgain(not_before=None, losses=known.losses if known else 0)
        if end is not None:
            step = Finish(status=TaskStatus(end))
        settlement = self.scene.settlement(
            name,
            step,
            attempt=attempt,
            node_id=node_id,
            cost=Usage(tokens=tokens, micro_usd=0),
        )
        answer = self.run(_awaited(lambda: self.store.settle(settlement)))
        expected = self.model.settle(name, attempt, node_id, end, tokens, self.clock())
        assert isinstance(answer, Settled) == expected

    def _cancel(self, draw: Draw) -> None:
        name = self._pick(draw, "queued", "assigned", "running")
        self.run(_awaited(lambda: self.store.cancel(name, node_id=HERE)))
        self.model.cancel(name, self.clock())

    def _drop(self, draw: Draw) -> None:
        name, end = self._pick(draw, "queued"), draw(st.sampled_from(["failed", "rejected"]))
        drop = Expiration(task_id=name, status=TaskStatus(end), error="dropped")
        self.run(self.store.drop(self.scene.epoch, [drop]))
        self.model.drop(name, end, self.clock())

    def _recover(self, _draw: Draw) -> None:
        names = list(self.model.tasks)
        self.run(self.store.recover(self.scene.epoch, names))
        for name in names:
            self.model.recover(name, self.clock(), max_losses=MAX_LOSSES)

    def _let_time_pass(self, draw: Draw) -> None:
        self.clock.advance(draw(st.sampled_from([1.0, 30.0])))

    def _evict(self, draw: Draw) -> None:
        most = draw(st.sampled_from([0, 1, 3, None]))
        self.run(self.store.evict(Retention(seconds=10, max_tasks=most), limit=100))
        self.model.evict(self.clock(), seconds=10, most=most)

    @invariant()
    def is_as_the_model_has_it(self) -> None:
        self.run(audit(self.store, has_evicted=True))
        backlog = self.run(self.store.backlog(self.scene.epoch))
        kept = {
            record.task.id: (
                record.task.status.value,
                record.progress.attempt,
                record.progress.waiting_for,
                record.progress.node_id,
                record.agent_id,
                record.progress.cancel_requested,
                [(one.attempt, one.node_id, one.tokens) for one in record.progress.attempts],
            )
            for record in backlog.records
        }
        assert kept == {
            name: (
                task.state,
                task.attempt,
                self.model.waiting_for(task),
                task.node_id,
                task.taken_by or task.agent_id,
                task.is_to_cancel,
                task.noted,
            )
            for name, task in self.model.tasks.items()
            if task.state not in ENDED
        }
        assert backlog.tick == self.model.ticks
        assert sum(row.tokens for row in backlog.usage) == self.model.shared_tokens

    @invariant()
    def what_ended_stays_ended(self) -> None:
        records = self.run(self.store.find(TaskQuery(limit=100))).records
        kept = {record.task.id: record.task.status.value for record in records}
        assert kept == {name: task.state for name, task in self.model.tasks.items()}


def check_against_the_model(
    make_place: Callable[[], Place], *, examples: int, steps: int, shrinks: bool = True
) -> None:
    """Run the machine on fresh stores."""
    place_maker = staticmethod(make_place)
    machine = type("Machine", (StoreMachine,), {"make_place": place_maker})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
            database=None,
            print_blob=False,
        ),
    )
