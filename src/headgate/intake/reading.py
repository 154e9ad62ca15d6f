"""From the body of a request to tasks that can be submitted.

Rule: whatever bytes come in, the answer is a draft or an `InvalidTaskError`, and nothing else is
raised. Nothing here waits, reads a clock or asks a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from headgate.core.budgets.scopes import Scope, parse_scope
from headgate.core.tasks.records import Submission, TaskRecord, Terms
from headgate.core.tasks.task import Task
from headgate.errors import InvalidTaskError
from headgate.intake import fields
from headgate.intake.binding import bind, check_scopes
from headgate.intake.bodies import BatchBody, BodyReader, TaskBody, shown
from headgate.settings.sections import DEFAULT_PROJECT
from headgate.tokens import UNBOUND, Bounds

MAX_BATCH = 50


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a task gets that does not say it; a timeout of None sets no deadline."""

    timeout_seconds: float | None = 900.0
    max_attempts: int = 1


class Draining(msgspec.Struct, frozen=True, kw_only=True):
    """Projects, agents and targets that finish what they have and take no new tasks."""

    projects: frozenset[str] = frozenset()
    agents: frozenset[str] = frozenset()
    targets: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.projects or self.agents or self.targets)


NOTHING_DRAINS = Draining()


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

    `targets` maps the name of each target to its slot, or to None where it has none,
    `target_providers` those that name a provider instead to that, and `agent_targets` agents to the
    target of those of their tasks that name none. `slots` maps the name of each slot that is
    configured to its provider. `check_url` says what is wrong with an address that is to be told
    of the end of a task.
    """

    def __init__(
        self,
        *,
        projects: Iterable[str] = (),
        targets: Mapping[str, str | None],
        default_target: str | None,
        agent_targets: Mapping[str, str] | None = None,
        target_providers: Mapping[str, str] | None = None,
        slots: Mapping[str, str] | None = None,
        defaults: Defaults | None = None,
        draining: Draining = NOTHING_DRAINS,
        check_url: Callable[[str], str | None] | None = None,
    ) -> None:
        self._scopes = {name: parse_scope(f"project:{name}") for name in projects}
        self._scopes.setdefault(DEFAULT_PROJECT, parse_scope(f"project:{DEFAULT_PROJECT}"))
        self._targets = dict(targets)
        self._default_target = default_target
        self._agent_targets = dict(agent_targets or {})
        self._target_providers = dict(target_providers or {})
        self._slots = dict(slots or {})
        self._defaults = defaults or Defaults()
        self._default_terms = Terms(max_attempts=self._defaults.max_attempts)
        self._check_url = check_url
        self._draining = draining
        self._bodies = BodyReader()

    def knows_project(self, project_id: str) -> bool:
        """Tell whether there is such a project."""
        return project_id in self._scopes

    def read_task(self, body: bytes, *, now: float, bounds: Bounds = UNBOUND) -> Draft:
        """Return the task of a request, or raise `InvalidTaskError`.

        `bounds` are those of whoever sends it.
        """
        return self._draft(self._bodies.task(body), now, bounds)

    def read_batch(self, body: bytes, *, now: float, bounds: Bounds = UNBOUND) -> Batch:
        """Return the tasks of a request; raise `InvalidTaskError` if it is wrong as a whole."""
        batch = self._bodies.batch(body)
        bind(batch, bounds)
        _require_agent(batch.agent_id, batch.project_id)
        tasks = batch.tasks or ()
        if not tasks:
            raise InvalidTaskError("batch_empty", "tasks", "a batch needs at least one task")
        if len(tasks) > MAX_BATCH:
            message = f"a batch has at most {MAX_BATCH} tasks, not {len(tasks)}"
            raise InvalidTaskError("batch_too_large", "tasks", message)
        return Batch([self._entry(raw, batch, now, bounds) for raw in tasks])

    def _entry(
        self, raw: msgspec.Raw, batch: BatchBody, now: float, bounds: Bounds
    ) -> Draft | InvalidTaskError:
        try:
            body = self._bodies.task(raw)
            body.agent_id = body.agent_id or batch.agent_id
            body.project_id = body.project_id or batch.project_id
            body.callback_url = body.callback_url or batch.callback_url
            return self._draft(body, now, bounds)
        except InvalidTaskError as error:
            return error

    def _draft(self, body: TaskBody, now: float, bounds: Bounds) -> Draft:
        if bounds is not UNBOUND:
            bind(body, bounds)
        _require_agent(body.agent_id, body.project_id)
        submission = _submission(body)
        task = self._task(body, now)
        if bounds is not UNBOUND:
            check_scopes(task, bounds)
        return Draft(task, self._terms(body), submission)

    def _task(self, body: TaskBody, now: float) -> Task:
        project_id = body.project_id or DEFAULT_PROJECT
        own = self._own_scope(project_id)
        target = self._target(body.target, body.agent_id)
        if self._draining:
            self._check_taken(project_id, body.agent_id, target)
        slot, provider = self._slot(body.slot, body.provider, target)
        not_before = fields.not_before(body.not_before, now=now) if body.not_before else None
        return Task(
            project_id=project_id,
            agent_id=fields.identifier(body.agent_id, "agentId") if body.agent_id else None,
            priority=fields.priority(body.priority) if body.priority else 0,
            weight=1.0 if body.weight is None else fields.weight(body.weight),
            created_at=now,
            estimate_tokens=fields.estimated_tokens(body.estimate) if body.estimate else None,
            deadline=self._deadline(body.deadline, now, not_before),
            not_before=not_before,
            scopes=fields.scopes(body.scopes, own) if body.scopes else (own,),
            target=target,
            slot=slot,
            provider=provider,
        )

    def _own_scope(self, project_id: str) -> Scope:
        try:
            return self._scopes[project_id]
        except KeyError:
            message = f"unknown project '{shown(project_id)}'"
            raise InvalidTaskError("unknown_project", "projectId", message) from None

    def _target(self, name: str | None, agent_id: str | None) -> str:
        wanted = name or self._agent_targets.get(agent_id or "") or self._default_target
        if wanted is None:
            message = "missing required field 'target': there is no default target"
            raise InvalidTaskError("missing_field", "target", message)
        if wanted not in self._targets:
            raise InvalidTaskError("unknown_target", "target", f"unknown target '{shown(wanted)}'")
        return wanted

    def _slot(
        self, slot: str | None, provider: str | None, target: str
    ) -> tuple[str | None, str | None]:
        """Return the slot or the provider of a task: what it says itself, or what its target says.

        The slot of a target need not be configured; then only limits are counted on it.
        """
        if slot and provider:
            fields.refuse("provider", "cannot be named beside a slot; leave one of them out")
        if slot:
            if slot not in self._slots:
                raise InvalidTaskError("unknown_slot", "slot", f"unknown slot '{shown(slot)}'")
            return slot, None
        if provider:
            if provider not in self._slots.values():
                message = f"unknown provider '{shown(provider)}': no slot has it"
                raise InvalidTaskError("unknown_provider", "provider", message)
            return None, provider
        return self._targets[target], self._target_providers.get(target)

    def _check_taken(self, project_id: str, agent_id: str | None, target: str) -> None:
        draining = self._draining
        for field, noun, name, names in (
            ("projectId", "project", project_id, draining.projects),
            ("agentId", "agent", agent_id, draining.agents),
            ("target", "target", target, draining.targets),
        ):
            if name in names:
                message = f"{noun} '{shown(name or '')}' is draining and takes no new tasks"
                raise InvalidTaskError("draining", field, message)

    def again(self, record: TaskRecord, *, now: float) -> Draft:
        """Return a task that ended as a new one, with its whole time before it.

        It is judged as if it were sent today. What it depended on has ended with it.
        """
        task = record.task
        own, target = self._own_scope(task.project_id), self._target(task.target, task.agent_id)
        if self._draining:
            self._check_taken(task.project_id, task.agent_id, target)
        own_word = (task.slot, task.provider) if record.terms.names_slot else (None, None)
        slot, provider = self._slot(*own_word, target)
        new = Task(
            project_id=task.project_id,
            agent_id=task.agent_id,
            priority=task.priority,
            weight=task.weight,
            created_at=now,
            estimate_tokens=task.estimate_tokens,
            deadline=self._deadline(None, now, None),
            scopes=task.scopes or (own,),
            target=target,
            slot=slot,
            provider=provider,
        )
        terms = msgspec.structs.replace(record.terms, depends_on=())
        return Draft(new, terms, msgspec.structs.replace(record.submission, retry_of=task.id))

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
            or body.timeout_seconds is not None
            or body.estimate is not None
            or body.cost_usd is not None
            or body.on_exhausted is not None
            or body.on_parent_failure is not None
            or body.callback_url
            or body.slot
            or body.provider
        ):
            return self._default_terms
        default = self._default_terms
        attempts, seconds = body.max_attempts, body.timeout_seconds
        return Terms(
            estimate_micro_usd=fields.estimated_micro_usd(body.estimate) if body.estimate else 0,
            max_attempts=default.max_attempts
            if attempts is None
            else fields.max_attempts(attempts),
            on_exhausted=body.on_exhausted or default.on_exhausted,
            on_parent_failure=body.on_parent_failure or default.on_parent_failure,
            depends_on=fields.depends_on(body.depends_on) if body.depends_on else (),
            callback_url=self._callback_url(body.callback_url) if body.callback_url else None,
            names_slot=bool(body.slot or body.provider),
            attempt_seconds=None if seconds is None else fields.timeout_seconds(seconds),
            cost_micro_usd=_cost(body),
        )

    def _callback_url(self, text: str) -> str:
        url = fields.callback_url(text)
        problem = self._check_url(url) if self._check_url is not None else None
        if problem is not None:
            fields.refuse("callbackUrl", problem)
        return url


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
        labels=fields.labels(body.labels) if body.labels else {},
    )


def _cost(body: TaskBody) -> int | None:
    if body.cost_usd is None:
        return None
    if body.estimate is not None and body.estimate.usd is not None:
        fields.refuse("costUsd", "cannot be named beside estimate.usd; leave one of them out")
    return fields.cost_micro_usd(body.cost_usd)


def _require_agent(agent_id: str | None, project_id: str | None) -> None:
    if not agent_id and not project_id:
        raise _missing("agentId")


def _missing(field: str) -> InvalidTaskError:
    return InvalidTaskError("missing_field", field, f"missing required field '{field}'")
