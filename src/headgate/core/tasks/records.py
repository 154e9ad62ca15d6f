"""The stored task: the task of the decision, and everything around it that the decision ignores.

`Task` is what is decided about. `Terms` say how failure, exhaustion and parents are treated, and
`Submission` is the work itself, which only the executor reads. A `TaskRecord` is all of it, with
what has become of the task so far.
"""

from __future__ import annotations

import msgspec

from headgate.core.enums import LenientEnum
from headgate.core.tasks.choice import Choice
from headgate.core.tasks.past_attempts import PastAttempt
from headgate.core.tasks.task import TERMINAL, Task

MAX_ATTEMPTS = 100
MAX_ATTEMPT_SECONDS = 7 * 86_400.0
WORKER_PREFIX = "worker-"
"""How the names of workers begin, and of no node: so a task in flight tells where it is."""

MAX_LOSSES = 5
"""How often a task may lose its node while it runs; then it is taken to be what kills them."""


def is_worker(node_id: str | None) -> bool:
    """Tell whether a node is the worker of an agent, and not a process of the service."""
    return node_id is not None and node_id.startswith(WORKER_PREFIX)


class OnExhausted(LenientEnum):
    """What a task does when a budget cannot hold it now but will be able to later."""

    WAIT = "wait"
    REJECT = "reject"


class OnParentFailure(LenientEnum):
    """What a task does when one that it depends on did not succeed."""

    FAIL = "fail"
    RUN = "run"


class Terms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The conditions of a task; the estimate in dollars is held beside that in tokens.

    `max_attempts` counts executions that failed by themselves: neither a lost node nor a
    provider's rate limit costs one. `callback_url` is told of the end of the task. With
    `names_slot` its slot or provider is its own word, and not that of its target. An attempt that
    takes longer than `attempt_seconds` is stopped and counts as failed; None is no such limit.
    Every attempt at a task with `cost_micro_usd` costs that, whatever the work reports.
    """

    estimate_micro_usd: int = 0
    max_attempts: int = 1
    on_exhausted: OnExhausted = OnExhausted.WAIT
    on_parent_failure: OnParentFailure = OnParentFailure.FAIL
    depends_on: tuple[str, ...] = ()
    callback_url: str | None = None
    names_slot: bool = False
    attempt_seconds: float | None = None
    cost_micro_usd: int | None = None


DEFAULT_TERMS = Terms()


class Submission(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What is to be done, as the client said it. `params` and `input` are JSON, kept unread."""

    action: str = ""
    tab_id: str | None = None
    selector: str | None = None
    ref: str | None = None
    params: msgspec.Raw | None = None
    input: msgspec.Raw | None = None
    labels: dict[str, str] = {}
    retry_of: str | None = None
    traceparent: str | None = None


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Who may write to a task in flight: one life of one node, for one attempt.

    The attempt is the fence. Every assignment has a number of its own, so what an earlier holder
    writes fits no row.
    """

    node_id: str
    attempt: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a task has come: the counts behind retries, and its latest attempt.

    `waiting_for` counts parents that have not ended, `dependants` the tasks that wait for this
    one. `used_…` is what all attempts were booked at, and `assumed_…` the part of it for which
    nobody gave a figure, so that what was held was booked. `node_id` is set while the task is in
    flight, and only then. `slot` is the one that was chosen for the latest attempt, of a task that
    names a provider, and `choice` why it was started. `attempts` has the latest of those after
    which it was tried again.
    """

    attempt: int = 0
    failures: int = 0
    losses: int = 0
    rate_limit_hits: int = 0
    not_before: float | None = None
    waiting_for: int = 0
    dependants: int = 0
    node_id: str | None = None
    reservation_id: str | None = None
    reserved_tokens: int = 0
    reserved_micro_usd: int = 0
    used_tokens: int = 0
    used_micro_usd: int = 0
    started_at: float | None = None
    completed_at: float | None = None
    cancel_requested: bool = False
    slot: str | None = None
    assumed_tokens: int = 0
    assumed_micro_usd: int = 0
    choice: Choice | None = None
    attempts: tuple[PastAttempt, ...] = ()


NO_PROGRESS = Progress()


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A task as the store keeps it; `result` is JSON, kept as it came.

    `position` is how many tasks waited when it was submitted, itself included.
    """

    task: Task
    terms: Terms = DEFAULT_TERMS
    submission: Submission = Submission()
    progress: Progress = NO_PROGRESS
    agent_id: str | None = None
    position: int = 0
    result: msgspec.Raw | None = None
    error: str | None = None
    tokens: int | None = None
    micro_usd: int | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether nothing can happen to the task any more."""
        return self.task.status in TERMINAL

    @property
    def lease(self) -> Lease | None:
        """The lease of a task in flight."""
        node_id = self.progress.node_id
        if node_id is None:
            return None
        return Lease(node_id=node_id, attempt=self.progress.attempt)


def slot_of(record: TaskRecord) -> str | None:
    """Return the slot of the latest attempt: the one that was chosen, or that the task names."""
    return record.progress.slot or record.task.slot


def waits_since(record: TaskRecord) -> float | None:
    """Return since when the latest attempt could have started; None if nobody knows."""
    task = record.task
    if record.progress.attempt == 1:
        return max(task.created_at, task.not_before or 0.0)
    return task.not_before
