"""A witness of every commit: it reads what is about to be true, and remembers what was.

What it finds wrong it writes down, since whoever commits would take an error for one of the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from headgate.core.budgets.ledger import Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.budgets.windows import live_from
from headgate.core.task import Progress, is_worker
from headgate.engine.engine import EngineSettings
from headgate.storage.memory import MemoryDatabase
from headgate.storage.sqlite import SqliteTransaction
from headgate.storage.unit_of_work import Spec
from headgate.storage.zones import zone

TERMINAL = {"done", "failed", "cancelled", "rejected"}
IN_FLIGHT = {"assigned", "running"}

_ROWS = "SELECT id, project_id, agent_id, state, progress, error, result, tokens, spec FROM tasks"
_LANES = "SELECT project_id, agent_id, queued, inflight FROM lanes"
_BALANCES = (
    "SELECT scope, bucket_start, spent_tokens + reserved_tokens,"
    " spent_micro_usd + reserved_micro_usd FROM ledger_balances"
)
_specs = msgspec.json.Decoder(Spec)
_progresses = msgspec.json.Decoder(Progress)


class WatchedDatabase(MemoryDatabase):
    """A database in memory that shows each transaction before it is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[SqliteTransaction], None] | None = None

    def commit(self) -> None:
        """End the transaction."""
        if self.look is not None:
            self.look(self._transaction)
        super().commit()


class Witness:
    """Holds every state of the store against the promises."""

    def __init__(self, settings: EngineSettings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.clock = clock
        self.commits = 0
        self.problems: list[str] = []
        self.starts: list[tuple[float, str | None]] = []
        self._final: dict[str, tuple[object, ...]] = {}
        self._attempts: dict[str, int] = {}
        self._leases: dict[tuple[str, int], str] = {}
        self._capacity = {agent.id: agent.capacity for agent in settings.dispatch.agents}
        self._caps = {
            project.id: project.max_concurrent_agents for project in settings.dispatch.projects
        }

    def look(self, transaction: SqliteTransaction) -> None:
        """Check what is about to be committed; before the tables are made there is nothing."""
        tables = transaction.read("SELECT 1 FROM sqlite_master WHERE name = 'tasks'")
        if not tables:
            return
        self.commits += 1
        rows = transaction.read(_ROWS)
        flying: list[tuple[str, str, str]] = []
        for row in rows:
            self._look_at_task(row, flying)
        self._check_places(flying)
        self._check_lanes(rows, transaction.read(_LANES))
        self._check_budgets(transaction.read(_BALANCES))

    def _look_at_task(self, row: tuple[object, ...], flying: list[tuple[str, str, str]]) -> None:
        task_id, project_id, agent_id, state = (str(value) for value in row[:4])
        known = self._final.get(task_id)
        if known is not None:
            if known != row[3:4] + row[5:]:
                self.problems.append(f"{task_id} had ended and was changed: {known} {row}")
            return
        if state in TERMINAL:
            self._final[task_id] = row[3:4] + row[5:]
            return
        progress = _progresses.decode(str(row[4]))
        self._check_attempt(task_id, progress, str(row[-1]))
        if state in IN_FLIGHT:
            flying.append((project_id, agent_id, progress.node_id or ""))
            self._check_lease(task_id, progress)
            is_pulled = (
                _specs.decode(str(row[-1])).task.target in self.settings.dispatch.pull_targets
            )
            if is_worker(progress.node_id) is not is_pulled:
                self.problems.append(f"{task_id} is at {progress.node_id}")

    def _check_attempt(self, task_id: str, progress: Progress, spec: str) -> None:
        before = self._attempts.get(task_id, 0)
        if progress.attempt not in (before, before + 1):
            self.problems.append(f"{task_id} went from attempt {before} to {progress.attempt}")
        if progress.attempt > before:
            self.starts.append((self.clock(), _specs.decode(spec).task.target))
        self._attempts[task_id] = progress.attempt

    def _check_lease(self, task_id: str, progress: Progress) -> None:
        node_id = progress.node_id or ""
        if self._leases.setdefault((task_id, progress.attempt), node_id) != node_id:
            self.problems.append(f"attempt {progress.attempt} at {task_id} has two leases")

    def _check_places(self, flying: list[tuple[str, str, str]]) -> None:
        dispatch_state = self.settings.dispatch
        if len(flying) > dispatch_state.max_inflight:
            self.problems.append(f"{len(flying)} tasks are in flight")
        for project_id, count in Counter(each[0] for each in flying).items():
            cap = self._caps.get(project_id)
            if cap is not None and count > cap:
                self.problems.append(f"project {project_id} has {count} in flight")
        for agent_id, count in Counter(each[1] for each in flying).items():
            if count > self._capacity.get(agent_id, dispatch_state.max_per_agent_inflight):
                self.problems.append(f"agent {agent_id} has {count} in flight")
        for node_id, count in Counter(each[2] for each in flying).items():
            if count > self.settings.capacity:
                self.problems.append(f"node {node_id} has {count} in flight")

    def _check_lanes(self, rows: list[tuple[object, ...]], lanes: list[tuple[object, ...]]) -> None:
        inflight = Counter((row[1], row[2]) for row in rows if row[3] in IN_FLIGHT)
        if {(lane[0], lane[1]): lane[3] for lane in lanes if lane[3]} != dict(inflight):
            self.problems.append(f"lanes say {lanes}, and in flight is {inflight}")
        queued = sum(row[3] == "queued" for row in rows)
        if sum(int(str(lane[2])) for lane in lanes) != queued:
            self.problems.append(f"lanes say {lanes}, and {queued} are queued")

    def _check_budgets(self, balances: list[tuple[object, ...]]) -> None:
        for scope, limit in self.settings.budgets.items():
            self._check_budget(scope, limit, [row[1:] for row in balances if row[0] == scope])

    def _check_budget(self, scope: Scope, limit: Limit, buckets: list[tuple[object, ...]]) -> None:
        since = live_from(limit.window, self.clock(), zone(limit.window.zone))
        live = [bucket for bucket in buckets if int(str(bucket[0])) >= since]
        tokens = sum(int(str(bucket[1])) for bucket in live)
        micro_usd = sum(int(str(bucket[2])) for bucket in live)
        is_over = limit.limit_tokens is not None and tokens > limit.limit_tokens
        is_over |= limit.limit_micro_usd is not None and micro_usd > limit.limit_micro_usd
        if is_over:
            self.problems.append(f"scope {scope} holds {tokens} tokens and {micro_usd}")
