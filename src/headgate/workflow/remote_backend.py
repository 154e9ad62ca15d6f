"""Steps of a run carried out by a service, over HTTP.

Every batch is written down before it is sent and goes under a key, so that a lost answer or a crash
submits nothing twice. A service that is full or away is waited for, and `trouble` says so. What the
service has taken is the service's: this process may end, and a resume finds it.

Rule: the service decides what may run and what it may cost; here is no second judgement of that.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from headgate.api.schema.admin import BulkCancelBody
from headgate.api.schema.tasks import BudgetStatusBody
from headgate.client.client import Client
from headgate.core.budgets.scopes import parse_scope
from headgate.core.money import plain_usd, to_limit_micro_usd
from headgate.errors import (
    BudgetMismatchError,
    NotAllowedError,
    RequestRefusedError,
    ServiceError,
    ServiceUnavailableError,
)
from headgate.redaction import hidden_address
from headgate.workflow.backend import (
    Money,
    StepOrder,
    StepTask,
    TaskListener,
    TaskState,
    with_last_try,
)
from headgate.workflow.budgets import change_at_service
from headgate.workflow.remote_journal import Journal, Opened
from headgate.workflow.remote_tasks import (
    RemoteSubmitter,
    RemoteWatch,
    Retrying,
    SharedFields,
    check_targets,
    may_pass,
    needed_steps,
    parcel_of,
    waits_for_window,
)
from headgate.workflow.run_record import RunScope
from headgate.workflow.workflow import Workflow

# The budgets of a run that a service keeps: whose they are, their limits, and how they stand.
#
# A token that is bound to a project or an agent may charge only budgets of its own; a run with
# such a token has its scopes within that. Rule: limits are created, as everywhere; only the
# workflow's own one is set anew, and only by somebody who says so. What a resume does not say is
# taken as it is.

MISMATCH = "budget_mismatch"


async def own_scope(client: Client, scopes: Sequence[RunScope]) -> str:
    """Return the budget that a bound token is for; empty if the run's scopes may be charged."""
    try:
        await client.budget_status(scopes[-1].scope)
    except NotAllowedError as error:
        if error.details.get("field") != "scope":
            raise
        return (await client.budget_status()).scope
    return ""


def within(outer: str, scopes: Sequence[RunScope]) -> tuple[RunScope, ...]:
    """Return scopes as they are within another one."""
    if not outer:
        return tuple(scopes)
    return tuple(
        [msgspec.structs.replace(one, scope=parse_scope(f"{outer}/{one.scope}")) for one in scopes]
    )


async def create_limits(
    client: Client,
    scopes: Sequence[RunScope],
    sources: Sequence[str | None],
    *,
    sets_own: bool,
) -> None:
    """Set the limits that are not there; one that differs raises `BudgetMismatchError`.

    The sources are what says each of them; where nothing does, another one may be in force.
    """
    for scope, source in zip(scopes, sources, strict=True):
        if scope.micro_usd is not None:
            limit_usd = plain_usd(scope.micro_usd)
            try:
                if sets_own and scope is scopes[-1]:
                    await client.change_budget(scope.scope, limit_usd=limit_usd)
                else:
                    await client.create_budget(scope.scope, limit_usd=limit_usd)
            except RequestRefusedError as error:
                if source is None and error.code == MISMATCH:
                    continue
                change = change_at_service(hidden_address(client.url))(scope.scope, limit_usd)
                raise _refused(scope.scope, limit_usd, error, source or "", change) from None


async def money_of(client: Client, scopes: Sequence[RunScope]) -> list[Money]:
    """Return how the scopes of a run stand, outermost first."""
    return [_money(await client.budget_status(one.scope)) for one in scopes]


def _money(status: BudgetStatusBody) -> Money:
    spent = to_limit_micro_usd(status.spent_usd) + to_limit_micro_usd(status.overrun_usd)
    limit = status.limit_usd
    return Money(
        scope=status.scope,
        spent_micro_usd=spent,
        reserved_micro_usd=to_limit_micro_usd(status.reserved_usd),
        limit_micro_usd=None if limit is None else to_limit_micro_usd(limit),
    )


def _refused(
    scope: str, limit_usd: str, error: RequestRefusedError, source: str, change: str
) -> Exception:
    if error.code == MISMATCH:
        existing = str(error.details.get("existing", "another one"))
        return BudgetMismatchError(
            scope=scope, existing=existing, wanted=f"${limit_usd}", source=source, change=change
        )
    if not isinstance(error, NotAllowedError):
        return error
    line = f"{scope}: this token may not set its limit to ${limit_usd}: {error}"
    return NotAllowedError(
        f"{line}; use one that may, or leave the amount out",
        code=error.code,
        status=error.status,
        details=error.details,
    )


# Which targets a service has, as far as whoever runs a workflow there may see it.


async def check_known_targets(client: Client, workflow: Workflow) -> None:
    """Refuse targets that the service does not have, if the token may see which it has."""
    try:
        targets = (await client.list_targets()).targets
    except NotAllowedError:
        return
    check_targets(workflow, [target.id for target in targets])


CANCELLING = 8
LEAVE_SECONDS = 10.0
"""How long somebody who interrupts a run has to interrupt it again, which cancels its tasks.

So long are the ends of cancelled tasks waited for as well.
"""
LAST_CANCEL_SECONDS = 5.0
"""How long a cancel that is on its way then may still take."""

_OVER = ("conflict", "not_found", "task_deleted")


class RemoteBackend:
    """Has a service carry out the steps of one run; see `headgate.workflow.backend`.

    The token is HEADGATE_TOKEN unless it is given. With `sets_own_limit` the limit of the
    workflow's own scope is set, whatever it was; all others are only created. `said_by` names for
    each scope the option that says its limit in this call; without any it is the file.
    """

    def __init__(
        self,
        url: str,
        *,
        run_id: str,
        workflow: Workflow,
        scopes: Sequence[RunScope],
        journal: Path,
        token: str | None = None,
        project_id: str | None = None,
        sets_own_limit: bool = False,
        said_by: Sequence[str | None] | None = None,
        leave_seconds: float = LEAVE_SECONDS,
    ) -> None:
        self._client = Client(url, token=token)
        self._run_id = run_id
        self._workflow = workflow
        self._scopes = tuple(scopes)
        self._project_id = project_id
        self._sets_own_limit = sets_own_limit
        self._said_by = said_by or [None] * len(scopes)
        self._needed = needed_steps(workflow)
        self._journal = Journal(journal)
        self._retrying = Retrying()
        self._watch = RemoteWatch(self._client, self._retrying, self._journal)
        self._sending = RemoteSubmitter(self._client, self._retrying, self._journal, self._watch)
        self._sender: SharedFields | None = None
        self._listener: TaskListener | None = None
        self._money: list[Money] = []
        self._leave_seconds = leave_seconds
        self._leaves_at = 0.0
        self._is_leaving = False
        self._is_closed = False
        self._cancelled_unanswered: set[str] = set()
        self._cancels = asyncio.Event()
        self._cancels.set()

    @property
    def trouble(self) -> str:
        """What is waited for at the service as a whole, in one line; empty if nothing is."""
        return self._retrying.trouble

    @property
    def unbooked_micro_usd(self) -> int:
        """Nothing: the service keeps the ledger of what it carries out."""
        return 0

    def check(self) -> None:
        """Raise what keeps the run from ever going on, such as a token that was revoked."""
        self._watch.check()

    @property
    def _label(self) -> str:
        """What all tasks of the run have at the service."""
        return f"run={self._run_id}"

    @property
    def remains(self) -> str:
        """What the service goes on with when this process ends, in one line; empty if nothing."""
        unanswered = [
            len(sent.orders)
            for key, sent in self._journal.pending.items()
            if key not in self._cancelled_unanswered
        ]
        count = len(self._journal.unfinished) + sum(unanswered)
        tasks = "1 task" if count == 1 else f"{count} tasks"
        where = f"--url {shlex.quote(hidden_address(self._client.url))}"
        cancel = f"headgate cancel --label {self._label} --yes {where}"
        line = f"the service goes on with {tasks} of this run; `{cancel}` cancels them"
        return line if count else ""

    def listen(self, listener: TaskListener) -> None:
        """Have changes told from now on; called once, before `open`."""
        self._listener = listener

    async def open(self) -> None:
        """Find the service, create limits, and see what became of what was sent before."""
        self._journal.open()
        before = self._journal.opened
        if before is None:
            around = await own_scope(self._client, self._scopes)
        else:
            around = before.within
        self._scopes = within(around, self._scopes)
        self._sender = SharedFields(
            run_id=self._run_id,
            workflow=self._workflow.name,
            scope=self._scopes[-1].scope,
            agent_id=_agent_of(around) or self._workflow.name,
            project_id=self._project_id,
            kinds={name: one.kind for name, one in self._workflow.endpoints.items()},
        )
        file = "the file" if before is None else None
        sources = [option or file for option in self._said_by]
        await create_limits(self._client, self._scopes, sources, sets_own=self._sets_own_limit)
        await check_known_targets(self._client, self._workflow)
        # Until here a run that is refused leaves nothing behind.
        await self._write_opened(around)
        await self._watch.start()
        await self._sending.take_up()
        await self._watch.look_at(list(self._journal.unfinished.values()))
        self._watch.listener = self._listener

    async def known(self) -> AsyncIterator[StepTask]:
        """Give every task that the run has already; it waits for nothing while it does."""
        going_on = {(task.number, task.generation): task for task in self._watch.tasks()}
        for task in going_on.values():
            yield task
        for task in self._journal.ended():
            # The end of one that is still followed will be told.
            if (task.number, task.generation) not in going_on:
                yield task

    async def submit(self, orders: Sequence[StepOrder]) -> None:
        """Have the service take these; what it refuses has failed, and is told as such."""
        sender, now = self._sender, datetime.now(UTC)
        assert sender is not None  # noqa: S101 - open comes first
        await self._sending.send_all(
            [
                parcel_of(order, sender, is_needed=order.step.id in self._needed, now=now)
                for order in orders
            ]
        )

    async def results(self, tasks: Sequence[StepTask]) -> list[Any]:
        """Return the results of tasks that are done, in their order, from the journal."""
        return [self._journal.result(task.number, task.generation) for task in tasks]

    async def cancel(self, tasks: Sequence[StepTask]) -> None:
        """Have the service cancel what waits and stop what runs; the ends are told as ever.

        What is still on its way there is cancelled once the service has said what it took of it.
        """
        wanted = [task for task in tasks if not task.state.has_ended]
        if not wanted or self._is_leaving:
            return
        self._leaves_at = asyncio.get_running_loop().time() + self._leave_seconds
        self._cancels.clear()
        permits = asyncio.Semaphore(CANCELLING)
        unanswered = {(task.number, task.generation) for task in wanted if not task.task_id}
        try:
            async with asyncio.timeout(self._leave_seconds + LAST_CANCEL_SECONDS):
                outcomes = await asyncio.gather(
                    *(self._cancel(task, permits) for task in wanted if task.task_id),
                    self._cancel_unanswered(unanswered, permits),
                    return_exceptions=True,
                )
        except TimeoutError:
            line = "the service has not answered in time whether it cancels the tasks"
            raise ServiceUnavailableError(line, code="no_answer") from None
        finally:
            self._cancels.set()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def why(self, task: StepTask) -> str:
        """Say why a task waits: what the service says of it, or why that cannot be asked."""
        self._watch.check()
        if self.trouble or not task.task_id:
            return self.trouble
        try:
            why = await self._client.why(task.task_id)
        except ServiceError as error:
            return str(error) if may_pass(error) else ""
        return with_last_try("; ".join(reason.message for reason in why.reasons), task)

    async def money(self) -> list[Money]:
        """Return the scopes of the run, outermost first; while the service is away, as they were.

        It raises what keeps the run from going on at all.
        """
        if self._is_closed:
            return self._money
        self._watch.check()
        try:
            self._money = await money_of(self._client, self._scopes)
        except ServiceError as error:
            if not may_pass(error):
                raise
        return self._money

    async def is_stuck(self) -> bool:
        """Tell whether nothing runs, and all that waits does so for the window of a budget."""
        self._watch.check()
        tasks = self._watch.tasks()
        if self.trouble or not tasks or any(task.state is TaskState.RUNNING for task in tasks):
            return False
        with suppress(ServiceError):
            for task in tasks:
                if not waits_for_window(await self._client.why(task.task_id)):
                    return False
            return True
        return False

    async def close(self, *, drain_seconds: float) -> None:
        """Take no more, wait a little for ends or for a cancel, and leave the rest to the service.

        What the service has goes on there without this process, so nobody is kept here for it.
        """
        # Whoever has interrupted twice already wants a cancel, which begins first.
        await asyncio.sleep(0)
        now = asyncio.get_running_loop().time()
        self._leaves_at = max(self._leaves_at, now + min(drain_seconds, self._leave_seconds))
        try:
            await self._sending.until_answered(lambda: self._leaves_at)
            await self._watch.until_quiet(lambda: self._leaves_at)
            await self._cancels.wait()
            self._is_leaving = True
            await self._sending.stop()
            await self._watch.stop()
        finally:
            self._is_closed = True
            await self._journal.close()
            await self._client.close()

    async def _write_opened(self, around: str) -> None:
        """Write down where the run is kept, when it is new or has moved."""
        before, server = self._journal.opened, self._client.url
        if before is None:
            keys = f"{self._run_id}-{secrets.token_hex(4)}"
            await self._journal.write(Opened(server=server, keys=keys, within=around))
        elif before.server != server:
            # Another service does not know the keys: what it was sent would be done twice.
            await self._sending.give_up()
            await self._journal.write(msgspec.structs.replace(before, server=server))

    async def _cancel(self, task: StepTask, permits: asyncio.Semaphore) -> None:
        async with permits:
            try:
                await self._retrying.ask(lambda: self._client.cancel(task.task_id))
            except RequestRefusedError as error:
                if error.code not in _OVER:
                    raise

    async def _cancel_unanswered(
        self, wanted: Set[tuple[int, int]], permits: asyncio.Semaphore
    ) -> None:
        """Cancel what the service was sent and has not answered yet, by its number and generation.

        Where the answer was lost or takes too long, all tasks of the run are cancelled.
        """
        if not wanted:
            return
        await self._sending.until_answered(lambda: self._leaves_at)
        taken = [task for task, _ in self._journal.unfinished.values()]
        await asyncio.gather(
            *(
                self._cancel(task, permits)
                for task in taken
                if (task.number, task.generation) in wanted
            )
        )
        orders = {key: sent.orders for key, sent in self._journal.pending.items()}
        lost = {
            key
            for key, sent in orders.items()
            if any((order.number, order.generation) in wanted for order in sent)
        }
        if lost:
            # What is on its way still may come after this.
            over = lost - self._sending.under_way
            await self._cancel_run()
            self._cancelled_unanswered |= over

    async def _cancel_run(self) -> None:
        def cancel() -> Awaitable[BulkCancelBody]:
            return self._client.cancel_matching(confirm=True, label=self._label)

        while (await self._retrying.ask(cancel)).remaining:
            continue


def _agent_of(scope: str) -> str | None:
    """Return the agent that a bound token is for, by the budget that is its own."""
    parts = [part.partition(":") for part in scope.split("/")]
    return next((name for kind, _, name in parts if kind == "agent"), None)
