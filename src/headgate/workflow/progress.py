"""How far a run has come: what is ready, what is skipped, and what nobody will run any more.

It is told what becomes of each run of a step, by its number, and says what may go out next, lowest
priority value first, then lowest number. It holds a byte a run, and does a fixed amount of work for
each, however many steps wait for how many others.

The rules. A run is ready when all steps that its own depends on have ended; of the step whose
items it has (`foreach: {step: …}`) only its counterpart counts, though all of them are waited for
where its texts refer to all. A parent that failed makes it skipped, and so does one that was
skipped altogether; one that was not run, because no budget held it or because the run of the
workflow was stopped, makes it not run either. `on_parent_failure: run` overrides all three. A step
without a single run counts as done.

Rule: every run of a step ends exactly once, and nothing that has ended is ever given out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from heapq import heappop, heappush, heapreplace

from headgate.core.task import OnParentFailure
from headgate.workflow.placeholders import ALL_RUNS_FIELDS, ONE_RUN_FIELDS
from headgate.workflow.workflow import Step, StepItems, Workflow, fields_of_steps

# How one run of a step stands, and how many runs of a step stand how.


class StepRunState(IntEnum):
    """How one run of a step stands; those that did not run say why not."""

    WAITING = 0
    SUBMITTED = 1
    DONE = 2
    FAILED = 3
    SKIPPED = 4
    """A parent failed, or was skipped altogether."""
    CONDITION_FALSE = 5
    """Its condition does not hold."""
    OVER_BUDGET = 6
    """No budget would hold it."""
    STOPPED = 7
    """The run of the workflow ended before it."""
    PARENT_NOT_RUN = 8
    """A parent was not run."""
    INTERRUPTED = 9
    """It had begun, and was stopped before it had ended."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to it, unless the workflow is resumed."""
        return self >= StepRunState.DONE

    @property
    def is_skipped(self) -> bool:
        """Whether the workflow itself said that it is not to run."""
        return self in (StepRunState.SKIPPED, StepRunState.CONDITION_FALSE)

    @property
    def is_not_run(self) -> bool:
        """Whether it would have run to its end under other circumstances."""
        return self >= StepRunState.OVER_BUDGET


ALL = tuple(StepRunState)


class StepCounts:
    """How the runs of one step stand; `left` are those that have not ended."""

    __slots__ = ("by_state", "left", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.left = total
        self.by_state = [0] * len(ALL)
        self.by_state[_WAITING] = total

    def __getitem__(self, run_state: StepRunState) -> int:
        return self.by_state[run_state]

    @property
    def skipped(self) -> int:
        """How many the workflow itself left out."""
        return self.by_state[StepRunState.SKIPPED] + self.by_state[StepRunState.CONDITION_FALSE]

    @property
    def not_run(self) -> int:
        """How many would have run to their end under other circumstances."""
        return sum(self.by_state[StepRunState.OVER_BUDGET :])

    def move(self, before: int, after: int) -> None:
        """Count one run elsewhere."""
        self.by_state[before] -= 1
        self.by_state[after] += 1
        if after >= _ENDED:
            self.left -= 1


_NUMBER_BITS = 32
_OF_ALL_RUNS = frozenset(ALL_RUNS_FIELDS) - frozenset(ONE_RUN_FIELDS)
_NUMBERS = (1 << _NUMBER_BITS) - 1
_WAITING = StepRunState.WAITING.value
_ENDED = StepRunState.DONE.value


class _Node:
    """One step among the others."""

    __slots__ = ("awaited", "blocked", "children", "counterpart", "counts", "followers", "is_open",
                 "parents", "runs", "step")  # fmt: skip

    def __init__(self, step: Step, runs: range) -> None:
        self.step = step
        self.runs = runs
        self.counts = StepCounts(len(runs))
        self.counterpart: _Node | None = None
        self.followers = _NOBODY
        self.parents = _NOBODY
        self.awaited = _NOBODY
        self.children = _NOBODY
        self.blocked = 0
        self.is_open = False


_NOBODY: list[_Node] = []
"""Stands for an empty list, which most steps have several of; nothing is ever added to it."""


class WorkflowProgress:
    """The state of one run of a workflow; `ended` is told each number when it has ended."""

    def __init__(
        self,
        workflow: Workflow,
        runs: Mapping[str, range],
        *,
        ended: Callable[[int], None] = lambda _number: None,
    ) -> None:
        self._nodes = [_Node(step, runs[step.id]) for step in workflow.steps]
        self._by_id = {node.step.id: node for node in self._nodes}
        self._starts = [node.runs.start for node in self._nodes]
        self._states = bytearray(sum(len(node.runs) for node in self._nodes))
        self._on_ended = ended
        self._ready: list[int] = []
        self._opening: deque[_Node] = deque()
        self._freed: deque[tuple[_Node, int]] = deque()
        self._has_started = False
        self.ended = 0
        for node in self._nodes:
            self._link(node)

    @property
    def total(self) -> int:
        """How many runs of steps there are."""
        return len(self._states)

    def restore(self, number: int, run_state: StepRunState) -> None:
        """Say, before the start, what an earlier process made of a run."""
        self._move(number, self._node(number), run_state)

    def start(self) -> None:
        """Find out what is ready; until then nothing is."""
        self._has_started = True
        for node in self._nodes:
            node.blocked = sum(1 for parent in node.awaited if parent.counts.left)
        self._opening.extend([node for node in self._nodes if not node.blocked])
        self._settle()

    def take(self) -> int | None:
        """Give out the next run that is ready; whoever takes it says what becomes of it."""
        ready = self._ready
        while ready:
            number = ready[0] & _NUMBERS
            node = self._node(number)
            if node.counterpart is None and number + 1 < node.runs.stop:
                heapreplace(ready, ready[0] + 1)
            else:
                heappop(ready)
            if self._states[number] == _WAITING:
                return number
        return None

    def submit(self, number: int) -> None:
        """Say that a run which was taken goes out."""
        self._move(number, self._node(number), StepRunState.SUBMITTED)

    def end(self, number: int, run_state: StepRunState, *, is_last: bool = False) -> bool:
        """Say how a run has ended; False if it had ended before.

        With `is_last` nothing is let out after it, and nothing follows from it: what waits is not
        run.
        """
        if self._states[number] >= _ENDED:
            return False
        self._end(number, self._node(number), run_state)
        if is_last:
            self.stop()
        self._settle()
        return True

    def stop(self) -> None:
        """Let nothing out any more: what waits is not run."""
        for node in self._nodes:
            if node.counts[StepRunState.WAITING]:
                for number in node.runs:
                    if self._states[number] == _WAITING:
                        self._end(number, node, StepRunState.STOPPED)
        self._settle()

    def run_state(self, number: int) -> StepRunState:
        """Return how a run stands."""
        return ALL[self._states[number]]

    def step(self, number: int) -> Step:
        """Return the step of a run."""
        return self._node(number).step

    def index(self, number: int) -> int:
        """Return which item a run has."""
        return number - self._node(number).runs.start

    def runs(self, step_id: str) -> range:
        """Return the numbers of a step's runs."""
        return self._by_id[step_id].runs

    def counts(self, step_id: str) -> StepCounts:
        """Return how the runs of a step stand."""
        return self._by_id[step_id].counts

    def totals(self) -> list[int]:
        """Return how the runs of all steps stand, as counts by their state."""
        return [sum(node.counts[run_state] for node in self._nodes) for run_state in ALL]

    def status(self, step_id: str) -> str:
        """Return the word for a step as a whole, as conditions read it."""
        counts = self._by_id[step_id].counts
        if counts[StepRunState.FAILED]:
            return "failed"
        if counts.not_run:
            return "not run"
        return "skipped" if counts.total and counts.skipped == counts.total else "done"

    def why(self, number: int) -> str:
        """Say why a run was skipped, was not run or waits, as far as the workflow tells."""
        node, run_state = self._node(number), self.run_state(number)
        if run_state is StepRunState.CONDITION_FALSE:
            condition = "" if node.step.when is None else node.step.when.source
            return f"when: {condition}"
        if run_state in (StepRunState.SKIPPED, StepRunState.PARENT_NOT_RUN):
            return next(self._complaints(node, number - node.runs.start), "")
        if run_state is StepRunState.OVER_BUDGET:
            return "no budget has room for it"
        if run_state is StepRunState.STOPPED:
            return "the run ended before it"
        if run_state is StepRunState.INTERRUPTED:
            return "it was stopped, and a resume begins it anew"
        return self._waits_for(node, number) if run_state is StepRunState.WAITING else ""

    def goes_without(self, number: int) -> bool:
        """Tell whether a run goes on although one of its parents failed or was not run."""
        node = self._node(number)
        if node.step.on_parent_failure is not OnParentFailure.RUN:
            return False
        faults = [_fault(parent.counts) for parent in node.parents]
        if node.counterpart is not None:
            faults.append(_fault_of_one(self._counterpart(node, number - node.runs.start)))
        return StepRunState.FAILED in faults or StepRunState.PARENT_NOT_RUN in faults

    def _link(self, node: _Node) -> None:
        source = node.step.foreach
        if isinstance(source, StepItems):
            node.counterpart = self._by_id[source.step]
            node.counterpart.followers = _with(node.counterpart.followers, node)
        for name in dict.fromkeys(node.step.depends_on):
            if (parent := self._by_id[name]) is not node.counterpart:
                node.parents = _with(node.parents, parent)
        node.awaited = node.parents
        if node.counterpart is not None and _reads_all(node.step, node.counterpart.step.id):
            node.awaited = [*node.parents, node.counterpart]
        for parent in node.awaited:
            parent.children = _with(parent.children, node)

    def _node(self, number: int) -> _Node:
        return self._nodes[bisect_right(self._starts, number) - 1]

    def _move(self, number: int, node: _Node, run_state: StepRunState) -> None:
        before = self._states[number]
        self._states[number] = run_state
        node.counts.move(before, run_state)
        if run_state >= _ENDED:
            self.ended += 1

    def _end(self, number: int, node: _Node, run_state: StepRunState) -> None:
        self._move(number, node, run_state)
        self._on_ended(number)
        if node.followers:
            self._freed.append((node, number - node.runs.start))
        if not node.counts.left:
            for child in node.children:
                child.blocked -= 1
                if not child.blocked:
                    self._opening.append(child)

    def _settle(self) -> None:
        """Follow what ended to everything that it decides; chains may be long, so without depth."""
        while self._has_started and (self._opening or self._freed):
            while self._freed:
                node, index = self._freed.popleft()
                for follower in node.followers:
                    if follower.is_open:
                        self._consider(follower, index)
            if self._opening:
                self._open(self._opening.popleft())

    def _open(self, node: _Node) -> None:
        node.is_open = True
        verdict = _verdict(node, [_fault(parent.counts) for parent in node.parents])
        if verdict is not None:
            for number in node.runs:
                if self._states[number] == _WAITING:
                    self._end(number, node, verdict)
        elif node.counterpart is None:
            if node.counts[StepRunState.WAITING]:
                heappush(self._ready, self._key(node, node.runs.start))
        else:
            for index in range(len(node.runs)):
                self._consider(node, index)

    def _consider(self, node: _Node, index: int) -> None:
        """Decide on a run with a counterpart, once that has ended."""
        number = node.runs[index]
        run_state = self._counterpart(node, index)
        if self._states[number] != _WAITING or not run_state.has_ended:
            return
        verdict = _verdict(node, [_fault_of_one(run_state)])
        if verdict is None:
            heappush(self._ready, self._key(node, number))
        else:
            self._end(number, node, verdict)

    def _counterpart(self, node: _Node, index: int) -> StepRunState:
        assert node.counterpart is not None  # noqa: S101  only asked of those that have one
        return self.run_state(node.counterpart.runs[index])

    def _key(self, node: _Node, number: int) -> int:
        # One integer sorts as the pair would, and takes a third of its memory.
        return (node.step.priority << _NUMBER_BITS) + number

    def _complaints(self, node: _Node, index: int) -> Iterator[str]:
        for parent in node.parents:
            if fault := _fault(parent.counts):
                yield f"{parent.step.id!r} {_words(fault)}"
        if node.counterpart is not None and (
            fault := _fault_of_one(self._counterpart(node, index))
        ):
            yield f"'{node.counterpart.step.id}[{index}]' {_words(fault)}"

    def _waits_for(self, node: _Node, number: int) -> str:
        for parent in node.awaited:
            if parent.counts.left:
                return f"waits for {parent.step.id!r}"
        index = number - node.runs.start
        if node.counterpart is None or self._counterpart(node, index).has_ended:
            return ""
        return f"waits for '{node.counterpart.step.id}[{index}]'"


def _with(nodes: list[_Node], another: _Node) -> list[_Node]:
    if nodes is _NOBODY:
        return [another]
    nodes.append(another)
    return nodes


def _reads_all(step: Step, other: str) -> bool:
    """Tell whether a step refers to all runs of another, and not only to one of them."""
    return any((other, field) in fields_of_steps(step) for field in _OF_ALL_RUNS)


def _fault(counts: StepCounts) -> StepRunState | None:
    """Return what of a step that has ended keeps others from running, if anything."""
    if counts[StepRunState.FAILED]:
        return StepRunState.FAILED
    if counts.not_run:
        return StepRunState.PARENT_NOT_RUN
    return StepRunState.SKIPPED if counts.total and counts.skipped == counts.total else None


def _fault_of_one(run_state: StepRunState) -> StepRunState | None:
    if run_state is StepRunState.FAILED:
        return StepRunState.FAILED
    if run_state.is_not_run:
        return StepRunState.PARENT_NOT_RUN
    return StepRunState.SKIPPED if run_state.is_skipped else None


def _verdict(node: _Node, faults: list[StepRunState | None]) -> StepRunState | None:
    """Return how a run ends because of its parents, or None if it may run."""
    if node.step.on_parent_failure is OnParentFailure.RUN:
        return None
    fault = next((fault for fault in faults if fault is not None), None)
    return StepRunState.SKIPPED if fault is StepRunState.FAILED else fault


def _words(fault: StepRunState) -> str:
    if fault is StepRunState.FAILED:
        return "failed"
    return "was skipped" if fault is StepRunState.SKIPPED else "was not run"
