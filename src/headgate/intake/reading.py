"""From the body of a request to tasks that can be submitted.

Rule: whatever bytes come in, the answer is a draft or an `InvalidTaskError`, and nothing else is
raised. Nothing here waits, reads a clock or asks a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from headgate.core.records import Submission, Terms
from headgate.core.scopes import Scope, parse_scope
from headgate.core.tasks import Task
from headgate.errors import InvalidTaskError
from headgate.intake import fields
from headgate.intake.bodies import BatchBody, BodyReader, TaskBody, shown

DEFAULT_PROJECT = "default"
MAX_BATCH = 50


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a task gets that does not say it; a timeout of None sets no deadline."""

    timeout_seconds: float | None = 900.0
    max_attempts: int = 1
    estimate_tokens: int | None = None
    estimate_micro_usd: int = 0


class Draft(NamedTuple):
    """A task that can be submitted; it has no id yet."""

    task: Task
    terms: Terms
    submission: Submission


class Batch(NamedTuple):
    """The tasks of one request in their order; those that cannot be taken are their errors."""

    entries: list[Draft | InvalidTaskError]


class Intake:
    """Judges submissions by the projects and targets that exist.

    `targets` maps the name of each target to its slot, or to None where it has none.
    """

    def __init__(
        self,
        *,
        projects: Iterable[str] = (),
        targets: Mapping[str, str | None],
        default_target: str | None,
        defaults: Defaults | None = None,
    ) -> None:
        self._scopes = {name: parse_scope(f"project:{name}") for name in projects}
        self._scopes.setdefault(DEFAULT_PROJECT, parse_scope(f"project:{DEFAULT_PROJECT}"))
        self._targets = dict(targets)
        self._default_target = default_target
        self._defaults = defaults or Defaults()
        self._default_terms = Terms(
            max_attempts=self._defaults.max_attempts,
            estimate_micro_usd=self._defaults.estimate_micro_usd,
        )
        self._bodies = BodyReader()

    def read_task(self, body: bytes, *, now: float) -> Draft:
        """Return the task of a request, or raise `InvalidTaskError`."""
        return self._draft(self._bodies.task(body), now)

    def read_batch(self, body: bytes, *, now: float) -> Batch:
        """Return the tasks of a request; raise `InvalidTaskError` if it is wrong as a whole."""
        batch = self._bodies.batch(body)
        _require_agent(batch.agent_id, batch.project_id)
        tasks = batch.tasks or ()
        if not tasks:
            raise InvalidTaskError("batch_empty", "tasks", "a batch needs at least one task")
        if len(tasks) > MAX_BATCH:
            message = f"a batch has at most {MAX_BATCH} tasks, not {len(tasks)}"
            raise InvalidTaskError("batch_too_large", "tasks", message)
        return Batch([self._entry(raw, batch, now) for raw in tasks])

    def _entry(self, raw: msgspec.Raw, batch: BatchBody, now: float) -> Draft | InvalidTaskError:
        try:
            body = self._bodies.task(raw)
            body.agent_id = body.agent_id or batch.agent_id
            body.project_id = body.project_id or batch.project_id
            body.callback_url = body.callback_url or batch.callback_url
            return self._draft(body, now)
        except InvalidTaskError as error:
            return error

    def _draft(self, body: TaskBody, now: float) -> Draft:
        _require_agent(body.agent_id, body.project_id)
        submission = _submission(body)
        return Draft(self._task(body, now), self._terms(body), submission)

    def _task(self, body: TaskBody, now: float) -> Task:
        project_id = body.project_id or DEFAULT_PROJECT
        own = self._own_scope(project_id)
        target = self._target(body.target)
        not_before = fields.not_before(body.not_before, now=now) if body.not_before else None
        return Task(
            project_id=project_id,
            agent_id=fields.identifier(body.agent_id, "agentId") if body.agent_id else None,
            priority=fields.priority(body.priority) if body.priority else 0,
            weight=1.0 if body.weight is None else fields.weight(body.weight),
            created_at=now,
            estimate_tokens=self._tokens(body),
            deadline=self._deadline(body.deadline, now, not_before),
            not_before=not_before,
            scopes=fields.scopes(body.scopes, own) if body.scopes else (own,),
            target=target,
            slot=self._targets[target],
        )

    def _tokens(self, body: TaskBody) -> int | None:
        if body.estimate is None:
            return self._defaults.estimate_tokens
        tokens = fields.estimated_tokens(body.estimate)
        return self._defaults.estimate_tokens if tokens is None else tokens

    def _own_scope(self, project_id: str) -> Scope:
        try:
            return self._scopes[project_id]
        except KeyError:
            message = f"unknown project '{shown(project_id)}'"
            raise InvalidTaskError("unknown_project", "projectId", message) from None

    def _target(self, name: str | None) -> str:
        wanted = name or self._default_target
        if wanted is None:
            message = "missing required field 'target': there is no default target"
            raise InvalidTaskError("missing_field", "target", message)
        if wanted not in self._targets:
            raise InvalidTaskError("unknown_target", "target", f"unknown target '{shown(wanted)}'")
        return wanted

    def _deadline(self, text: str | None, now: float, not_before: float | None) -> float | None:
        if text:
            deadline = fields.deadline(text, now=now)
            if not_before is not None and not_before >= deadline:
                fields.refuse("notBefore", "is not before the deadline")
            return deadline
        if self._defaults.timeout_seconds is None:
            return None
        # A task that asks to start later has its whole time from then on.
        return (not_before or now) + self._defaults.timeout_seconds

    def _terms(self, body: TaskBody) -> Terms:
        if not (
            body.depends_on
            or body.max_attempts is not None
            or body.estimate is not None
            or body.on_exhausted is not None
            or body.on_parent_failure is not None
        ):
            return self._default_terms
        default = self._default_terms
        attempts = body.max_attempts
        return Terms(
            estimate_micro_usd=self._micro_usd(body),
            max_attempts=default.max_attempts
            if attempts is None
            else fields.max_attempts(attempts),
            on_exhausted=body.on_exhausted or default.on_exhausted,
            on_parent_failure=body.on_parent_failure or default.on_parent_failure,
            depends_on=fields.depends_on(body.depends_on) if body.depends_on else (),
        )

    def _micro_usd(self, body: TaskBody) -> int:
        given = body.estimate
        micro_usd = None if given is None else fields.estimated_micro_usd(given)
        return self._defaults.estimate_micro_usd if micro_usd is None else micro_usd


def _submission(body: TaskBody) -> Submission:
    given = fields.json_value(body.input, "input") if body.input else None
    if not body.action and given is None:
        raise _missing("action")
    return Submission(
        action=fields.identifier(body.action, "action") if body.action else "",
        tab_id=fields.identifier(body.tab_id, "tabId") if body.tab_id else None,
        selector=fields.selector(body.selector) if body.selector else None,
        ref=fields.identifier(body.ref, "ref") if body.ref else None,
        params=fields.json_object(body.params, "params") if body.params else None,
        input=given,
        callback_url=fields.callback_url(body.callback_url) if body.callback_url else None,
        labels=fields.labels(body.labels) if body.labels else {},
    )


def _require_agent(agent_id: str | None, project_id: str | None) -> None:
    if not agent_id and not project_id:
        raise _missing("agentId")


def _missing(field: str) -> InvalidTaskError:
    return InvalidTaskError("missing_field", field, f"missing required field '{field}'")
