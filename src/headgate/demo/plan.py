"""What the agents of the demonstration submit, and when: drawn from one seed, without an end.

First come tasks that show what it looks like when something is the matter: a project that is
paused, a budget that is used up and one that nearly is, a webhook that nobody takes. Then work
comes in waves, a few tasks a second, of which most succeed. Rule: one seed gives one plan, and what
it shows in the first minute it shows for as long as anybody looks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from random import Random
from typing import Literal, NamedTuple

import msgspec

from headgate.client.task_fields import TaskFields

SEED = 1
TASKS_PER_SECOND = 3.0
LEAST_GAP_SECONDS = 0.1
WAVE_SECONDS = 120.0
WAVE_HEIGHT = 0.6
DOLLARS_PER_MILLION_TOKENS = 6.0
MAX_PARENTS = 2
OPENING_SECONDS = 0.4
FIRST = -10
OPENING_DEADLINE = timedelta(days=30)
"""Some of the first tasks are there to wait, and would otherwise fail after 15 minutes."""

FAIL_SHARE = 0.05
RECOVER_SHARE = 0.04
CANCEL_SHARE = 0.02
REFUSED_SHARE = 0.01
WEBHOOK_SHARE = 0.05
OPEN_SHARE = 0.3
COMPARED_SHARE = 0.3

USED_UP = "session:load-test"
NEARLY_USED_UP = "session:spring-survey"
PAUSED = "archive"

Hook = Literal["taken", "gone"]
Course = Literal["succeeds", "fails", "recovers"]


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task to come: `parents` are numbers of earlier ones, `hook` is where its end is told."""

    number: int
    at_seconds: float
    fields: TaskFields
    parents: tuple[int, ...] = ()
    hook: Hook | None = None
    is_cancelled: bool = False


class Kind(NamedTuple):
    """One kind of work: who does it, how often it comes, how long it takes and what it uses."""

    action: str
    project: str
    agents: tuple[str, ...]
    share: int
    seconds: tuple[float, float]
    tokens: tuple[int, int]
    subjects: tuple[str, ...]
    target: str | None = None
    scope: str | None = None


_FETCH = Kind(
    action="fetch-page",
    project="crawler",
    agents=("crawler-1", "crawler-2", "crawler-3"),
    share=9,
    seconds=(0.3, 4.0),
    tokens=(200, 1_200),
    subjects=("price list", "release notes", "product page", "support forum"),
)
_SUMMARISE = Kind(
    action="summarise",
    project="research",
    agents=("researcher-1", "researcher-2", "researcher-3"),
    share=5,
    seconds=(0.4, 2.5),
    tokens=(800, 4_000),
    subjects=("three papers on caching", "an interview", "the quarterly report", "a long thread"),
)
KINDS = (
    _FETCH,
    _SUMMARISE,
    Kind(
        action="review-change",
        project="research",
        agents=("reviewer-1", "reviewer-2"),
        share=2,
        seconds=(3.0, 9.0),
        tokens=(2_000, 8_000),
        subjects=("the parser", "the login page", "the retry loop", "a migration"),
        scope="session:release/workflow:review",
    ),
    Kind(
        action="grade-answer",
        project="evals",
        agents=("grader-1", "grader-2"),
        share=4,
        seconds=(0.3, 1.2),
        tokens=(800, 4_200),
        subjects=("question 12", "question 40", "question 77", "question 103"),
    ),
    Kind(
        action="answer-ticket",
        project="support",
        agents=("helper-1", "helper-2"),
        share=4,
        seconds=(0.5, 3.0),
        tokens=(1_500, 6_500),
        subjects=("a refund", "a lost password", "an invoice", "a slow export"),
        target="model",
    ),
)
_SHARES = [kind.share for kind in KINDS]


def plan(seed: int = SEED) -> Iterator[PlannedTask]:
    """Give every task in the order of its time, which counts from the beginning."""
    drawn = Random(seed)  # noqa: S311 - nothing here is a secret
    numbers = count()
    for fields, hook in _opening():
        yield PlannedTask(number=next(numbers), at_seconds=0.0, fields=fields, hook=hook)
    fetched: deque[int] = deque(maxlen=MAX_PARENTS)
    at_seconds = 0.0
    for number in numbers:
        task = _next(drawn, number, at_seconds, tuple(fetched))
        if task.fields["action"] == _FETCH.action and not (task.is_cancelled or _is_refused(task)):
            fetched.append(number)
        yield task
        at_seconds += max(LEAST_GAP_SECONDS, drawn.expovariate(_rate(at_seconds)))


def _is_refused(task: PlannedTask) -> bool:
    return task.fields.get("on_exhausted") == "reject"


def _rate(at_seconds: float) -> float:
    """Return how many tasks come in a second: by and by more than can run, then fewer."""
    wave = math.sin(2 * math.pi * at_seconds / WAVE_SECONDS)
    return TASKS_PER_SECOND * (1 + WAVE_HEIGHT * wave)


def _opening() -> Iterator[tuple[TaskFields, Hook | None]]:
    for user in range(1, 9):
        yield _charged("load-test", f"user {user}", usd="0.01", scope=USED_UP), None
    for person in range(1, 13):
        yield _charged("survey", f"person {person}", usd="0.0155", scope=NEARLY_USED_UP), None
    yield _short("report", "to an address that is gone", project_id="research"), "gone"
    for part in range(1, 6):
        yield _short("compress", f"volume {part}", project_id=PAUSED), None


def _short(action: str, subject: str, *, project_id: str) -> TaskFields:
    """Return a task that is soon done, and goes before others, so that its effect is seen."""
    params = _params(subject, OPENING_SECONDS, 900, "succeeds")
    return TaskFields(
        action=action,
        project_id=project_id,
        params=params,
        priority=FIRST,
        deadline=OPENING_DEADLINE,
    )


def _charged(action: str, subject: str, *, usd: str, scope: str) -> TaskFields:
    fields = _short(action, subject, project_id="evals")
    fields["scopes"], fields["estimate_usd"] = [scope], usd
    return fields


def _next(drawn: Random, number: int, at_seconds: float, fetched: tuple[int, ...]) -> PlannedTask:
    kind = drawn.choices(KINDS, _SHARES)[0]
    fields = _work(drawn, kind, number)
    has_parents = kind is _SUMMARISE and drawn.random() < COMPARED_SHARE
    return PlannedTask(
        number=number,
        at_seconds=at_seconds,
        fields=fields,
        parents=fetched if has_parents else (),
        hook="taken" if drawn.random() < WEBHOOK_SHARE else None,
        is_cancelled=drawn.random() < CANCEL_SHARE,
    )


def _work(drawn: Random, kind: Kind, number: int) -> TaskFields:
    estimate = drawn.randint(*kind.tokens)
    used = round(estimate * drawn.uniform(0.6, 1.1))
    fields = TaskFields(
        action=kind.action,
        project_id=kind.project,
        agent_id=None if drawn.random() < OPEN_SHARE else drawn.choice(kind.agents),
        target=kind.target,
        params=_params(
            drawn.choice(kind.subjects), drawn.uniform(*kind.seconds), used, _course(drawn)
        ),
        priority=drawn.choice((-1, 0, 0, 0, 1)),
        estimate_tokens=estimate,
        estimate_usd=f"{estimate * DOLLARS_PER_MILLION_TOKENS / 1e6:.6f}",
        scopes=[kind.scope] if kind.scope else [],
        labels={"team": kind.project, "run": f"run-{number // 100 % 10}"},
        max_attempts=3,
    )
    if drawn.random() < REFUSED_SHARE:
        fields["scopes"], fields["on_exhausted"] = [USED_UP], "reject"
    return fields


def _course(drawn: Random) -> Course:
    draw = drawn.random()
    if draw < FAIL_SHARE:
        return "fails"
    return "recovers" if draw < FAIL_SHARE + RECOVER_SHARE else "succeeds"


def _params(subject: str, seconds: float, tokens: int, course: Course) -> dict[str, object]:
    """Say what the program on the other side does with a task, and to what it is done."""
    return {"of": subject, "seconds": round(seconds, 2), "tokens": tokens, "course": course}
