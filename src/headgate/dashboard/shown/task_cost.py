"""What a task was thought to cost, and what it did, as rows of a table and as bars.

Rule: what nobody knows is said in a word; a zero is shown only where something was counted.
"""

from __future__ import annotations

import msgspec

from headgate.core.tasks.records import TaskRecord
from headgate.core.tasks.task import TaskStatus
from headgate.core.texts.figures import percent

NONE, NOT_YET, NOTHING = "none", "not yet", "nothing"
IN_FLIGHT = (TaskStatus.ASSIGNED, TaskStatus.RUNNING)


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table; where an amount is not known, `absent` says so."""

    name: str
    tokens: int | None
    micro_usd: int | None
    absent: str = NONE


class EstimateBar(msgspec.Struct, frozen=True, kw_only=True):
    """What was used of an estimate, and beyond it, in one unit."""

    within: int
    beyond: int
    estimate: int
    words: str


def cost_rows(record: TaskRecord) -> list[CostRow]:
    """Return everything that is known of what a task costs, the estimate first."""
    terms, progress = record.terms, record.progress
    estimate = record.task.estimate_tokens
    rows = [
        CostRow(name="Estimate", tokens=estimate, micro_usd=terms.estimate_micro_usd or None),
    ]
    if terms.cost_micro_usd is not None:
        rows.append(CostRow(name="Known beforehand", tokens=None, micro_usd=terms.cost_micro_usd))
    if record.task.status in IN_FLIGHT:
        held = (progress.reserved_tokens, progress.reserved_micro_usd)
        rows.append(CostRow(name="Reserved now", tokens=held[0], micro_usd=held[1]))
    rows.append(_booked(record))
    if progress.assumed_tokens or progress.assumed_micro_usd:
        assumed = (progress.assumed_tokens, progress.assumed_micro_usd)
        rows.append(CostRow(name="Of that assumed", tokens=assumed[0], micro_usd=assumed[1]))
    if progress.attempt > 1 and record.tokens is not None:
        last = (record.tokens, record.micro_usd or 0)
        rows.append(CostRow(name="The last attempt", tokens=last[0], micro_usd=last[1]))
    return rows


def _booked(record: TaskRecord) -> CostRow:
    if record.tokens is None and record.micro_usd is None:
        absent = NOTHING if record.is_terminal else NOT_YET
        return CostRow(name="Booked", tokens=None, micro_usd=None, absent=absent)
    used = record.progress
    return CostRow(name="Booked", tokens=used.used_tokens, micro_usd=used.used_micro_usd)


def estimate_bars(record: TaskRecord) -> list[EstimateBar]:
    """Return a bar for each unit that has an estimate, once something was booked."""
    if record.tokens is None:
        return []
    units = (
        ("Tokens", record.progress.used_tokens, record.task.estimate_tokens),
        ("Dollars", record.progress.used_micro_usd, record.terms.estimate_micro_usd),
    )
    return [
        EstimateBar(
            within=min(used, estimate),
            beyond=max(0, used - estimate),
            estimate=estimate,
            words=f"{name}: {percent(used / estimate)} of the estimate",
        )
        for name, used, estimate in units
        if estimate
    ]
