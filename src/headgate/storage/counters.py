"""Tallies: what a batch of steps adds to the counts, as one sum a row.

Lanes, counters, usage and rate counts are sums over everything that happened. A transaction adds
up its own part here and writes it at the end: one row update each, however many steps changed it.

Rule: a count is changed by the step that changes the task, in the same transaction. So the counts
always equal what the rows say, and nothing that is retried is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from headgate.core.fair_share import SECONDS_PER_HOUR
from headgate.core.lane_index import NEVER_SERVED
from headgate.core.rate_limits import RateCharge
from headgate.core.task import TaskStatus
from headgate.storage.transaction import Insert, Transaction

QUEUED = "queued"
TICK = "tick"
SUBMITTED = "submitted"
STARTED = "started"
EXPIRED = "expired"
WAIT_MS = "wait_ms"
ENDED = {
    TaskStatus.DONE: "completed",
    TaskStatus.FAILED: "failed",
    TaskStatus.CANCELLED: "cancelled",
    TaskStatus.REJECTED: "rejected",
}
HAPPENINGS = (SUBMITTED, *ENDED.values(), EXPIRED, STARTED, WAIT_MS)
"""What is counted for the whole store and for each lane."""

OPEN_LANE = ""


class Tally(Insert, frozen=True, kw_only=True):
    """Rows of amounts: one whose key exists has them added, or keeps the highest."""

    highest: tuple[str, ...] = ()

    @property
    def on_conflict(self) -> str:
        """The end of the statement, after its rows."""
        table = self.table
        changes = [f"{name} = {table}.{name} + excluded.{name}" for name in self.updated]
        changes += [_higher(table, name) for name in self.highest]
        return f" ON CONFLICT ({', '.join(self.key)}) DO UPDATE SET {', '.join(changes)}"


def _tally(
    table: str, key: dict[str, str], added: tuple[str, ...], highest: tuple[str, ...] = ()
) -> Tally:
    amounts = [(name, "BIGINT") for name in (*added, *highest)]
    return Tally(
        table=table,
        columns=(*key.items(), *amounts),
        key=tuple(key),
        updated=added,
        highest=highest,
    )


def _higher(table: str, name: str) -> str:
    is_higher = f"excluded.{name} > {table}.{name}"
    return f"{name} = CASE WHEN {is_higher} THEN excluded.{name} ELSE {table}.{name} END"


COUNTERS = _tally("counters", {"name": "TEXT"}, ("amount",))
LANES = _tally(
    "lanes",
    {"agent_id": "TEXT", "project_id": "TEXT"},
    ("queued", "inflight", *HAPPENINGS),
    ("served_tick",),
)
_PLACES = {name: place for place, name in enumerate(HAPPENINGS, start=2)}
_NEW_LANE = (0,) * (2 + len(HAPPENINGS))
USAGE = _tally(
    "project_usage",
    {"project_id": "TEXT", "hour": "BIGINT"},
    ("tokens", "micro_usd", "started", "completed", "forgiven"),
)
USED = _tally(
    "usage_rows",
    {"hour": "BIGINT", "project_id": "TEXT", "agent_id": "TEXT", "model": "TEXT"},
    ("tasks", "attempts", "tokens", "micro_usd"),
)
RATES = _tally("rate_counts", {"limit_id": "TEXT", "bucket": "BIGINT"}, ("amount",))


class Counters:
    """What one transaction adds to the counts."""

    __slots__ = ("_hour", "_lanes", "_rates", "_usage", "_used", "counters", "queued_by_agent")

    def __init__(self, now: float) -> None:
        self.counters: dict[str, int] = {QUEUED: 0}
        self.queued_by_agent: dict[str, int] = {}
        self._hour = int(now) // SECONDS_PER_HOUR * SECONDS_PER_HOUR
        self._lanes: dict[tuple[str, str], list[int]] = {}
        self._usage: dict[str, list[int]] = {}
        self._used: dict[tuple[str, str, str], list[int]] = {}
        self._rates: dict[tuple[str, int], int] = {}

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def happen(self, name: str, agent_id: str | None, project_id: str, amount: int = 1) -> None:
        """Count something that happened to a task, for the store and for the lane."""
        self.counters[name] = self.counters.get(name, 0) + amount
        self._lane(agent_id or OPEN_LANE, project_id)[_PLACES[name]] += amount

    def queue(self, agent_id: str | None, project_id: str, amount: int) -> None:
        """Count tasks into or out of the lane that they wait in."""
        agent = agent_id or OPEN_LANE
        self._lane(agent, project_id)[0] += amount
        self.counters[QUEUED] += amount
        self.queued_by_agent[agent] = self.queued_by_agent.get(agent, 0) + amount

    def fly(self, agent_id: str | None, project_id: str, amount: int) -> None:
        """Count places that are taken or freed."""
        self._lane(agent_id or OPEN_LANE, project_id)[1] += amount

    def serve(self, agent_id: str | None, project_id: str, tick: int) -> None:
        """Note when a lane was last served."""
        lane = self._lane(agent_id or OPEN_LANE, project_id)
        lane[-1] = max(lane[-1], tick)

    def spend(self, project_id: str, *, tokens: int, micro_usd: int) -> None:
        """Add to what a project used in this hour."""
        sums = self._project(project_id)
        sums[0] += tokens
        sums[1] += micro_usd

    def use(self, key: tuple[str, str, str], *, is_over: bool, tokens: int, micro_usd: int) -> None:
        """Add an attempt to what a project, an agent and a model used; its task may be over."""
        sums = self._used.get(key)
        if sums is None:
            sums = self._used[key] = [0, 0, 0, 0]
        sums[0] += is_over
        sums[1] += 1
        sums[2] += tokens
        sums[3] += micro_usd

    def start(self, project_id: str) -> None:
        """Count a task of a project that was started."""
        self._project(project_id)[2] += 1

    def complete(self, project_id: str) -> None:
        """Count a task of a project that was done."""
        self._project(project_id)[3] += 1

    def forgive(self, project_id: str, tokens: int) -> None:
        """Add to the lag that a project was forgiven in this hour."""
        self._project(project_id)[4] += tokens

    def charge(self, charges: Iterable[RateCharge]) -> None:
        """Add to the counts of rate limits."""
        for charge in charges:
            key = (charge.limit_id, charge.bucket)
            self._rates[key] = self._rates.get(key, 0) + charge.amount

    def write(self, transaction: Transaction) -> None:
        """Write all sums."""
        counters = [(name, amount) for name, amount in self.counters.items() if amount]
        transaction.insert(COUNTERS, counters)
        transaction.insert(LANES, [(*key, *sums) for key, sums in self._lanes.items()])
        usage = [(project_id, self._hour, *sums) for project_id, sums in self._usage.items()]
        transaction.insert(USAGE, usage)
        if self._used:
            transaction.insert(
                USED, [(self._hour, *key, *sums) for key, sums in self._used.items()]
            )
        transaction.insert(RATES, [(*key, amount) for key, amount in self._rates.items()])

    def _lane(self, agent_id: str, project_id: str) -> list[int]:
        key = (agent_id, project_id)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = [*_NEW_LANE, NEVER_SERVED]
        return lane

    def _project(self, project_id: str) -> list[int]:
        sums = self._usage.get(project_id)
        if sums is None:
            sums = self._usage[project_id] = [0, 0, 0, 0, 0]
        return sums
