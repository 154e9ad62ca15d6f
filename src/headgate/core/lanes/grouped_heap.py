"""The waiting tasks of a lane in order, in groups that can be switched off whole.

It answers one question, which task comes first among the open gates, and it keeps three rules.
Tasks that arrive in order cost the same whether ten wait or a million: each class of a group is a
row that is appended to at one end and taken from at the other. Removing a task costs nothing at
once: a dead entry is dropped when it comes to the front, and a lane that is more than half dead is
rebuilt. A closed gate costs nothing: its tasks stay where they are until it opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count, islice

from headgate.core.gates import Gate
from headgate.core.tasks.task import Task

SLACK = 16

Rank = tuple[float, float, str]
"""What orders the tasks of a lane; the last element is the task's id and makes it unique."""

Entry = tuple[float, float, str, int, Task]
"""A rank, the number of the push, which keeps two versions of one task apart, and the task."""


class Row:
    """Tasks of one gate and class: a sorted list taken from the front, and a heap of latecomers."""

    __slots__ = ("_front", "_late", "_sorted", "gate", "group", "offer", "serial")

    def __init__(self, gate: Gate, group: int, serial: int) -> None:
        self.gate = gate
        self.group = group
        self.serial = serial
        self.offer: Offer | None = None
        self._sorted: list[Entry] = []
        self._front = 0
        self._late: list[Entry] = []

    def __iter__(self) -> Iterator[Entry]:
        yield from self._sorted[self._front :]
        yield from self._late

    def push(self, entry: Entry) -> None:
        """Add an entry, at no cost if it comes after all others."""
        if not self._sorted or self._sorted[-1] < entry:
            self._sorted.append(entry)
        else:
            heappush(self._late, entry)

    def first(self) -> Entry | None:
        """Return the entry that comes first, dead or alive."""
        if self._front == len(self._sorted):
            return self._late[0] if self._late else None
        entry = self._sorted[self._front]
        return self._late[0] if self._late and self._late[0] < entry else entry

    def drop_first(self) -> None:
        """Drop the entry that comes first."""
        if self._late and self.first() is self._late[0]:
            heappop(self._late)
            return
        self._front += 1
        if self._front > SLACK and 2 * self._front > len(self._sorted):
            del self._sorted[: self._front]
            self._front = 0

    def rebuild(self, entries: Iterable[Entry]) -> None:
        """Replace all entries."""
        self._sorted = sorted(entries)
        self._front = 0
        self._late = []


Offer = tuple[float, float, str, int, Row, Entry]
"""The first entry of a row among those of its lane; only the latest offer of a row counts."""


class GroupedHeap:
    """The waiting tasks of one lane, by gate and class, in the order of their ranks.

    `waiting` is shared with the index: a task is alive while `waiting` holds that very object.
    A class is any number that most arrivals are in order within, such as the priority.
    """

    __slots__ = ("_entries", "_heads", "_most_heads", "_pushes", "_rows", "_waiting")

    def __init__(self, waiting: dict[str, Task]) -> None:
        self._waiting = waiting
        self._rows: dict[Gate, dict[int, Row]] = {}
        self._heads: list[Offer] = []
        self._most_heads = SLACK
        self._entries = 0
        self._pushes = count()

    def push(self, gate: Gate, group: int, rank: Rank, task: Task) -> None:
        """Add a task; it is offered at once if it is first and the gate is open."""
        row = self._row(gate, group)
        entry = (*rank, next(self._pushes), task)
        row.push(entry)
        self._entries += 1
        if not gate.closed_by and row.first() is entry:
            self._offer(row, entry)

    def load(self, gate: Gate, ranked: Iterable[tuple[int, Rank, Task]]) -> None:
        """Add many tasks of one gate, for less than pushing each."""
        rows: dict[int, list[Entry]] = {}
        for group, rank, task in ranked:
            rows.setdefault(group, []).append((*rank, next(self._pushes), task))
        for group, entries in rows.items():
            row = self._row(gate, group)
            row.rebuild([*row, *entries])
            self._entries += len(entries)
        self.reopen(gate)

    def reopen(self, gate: Gate) -> None:
        """Offer the rows of a gate that has just opened."""
        for row in self._rows[gate].values():
            head = self._head(row)
            if head is not None and not gate.closed_by:
                self._offer(row, head)

    def drop(self, gate: Gate) -> None:
        """Forget a gate behind which nobody waits."""
        for row in self._rows.pop(gate).values():
            row.offer = None
            self._entries -= sum(1 for _ in row)

    def prune(self, alive: int) -> None:
        """Rebuild the rows once the dead outnumber the living."""
        if self._entries <= 2 * alive + SLACK:
            return
        for rows in self._rows.values():
            for group, row in list(rows.items()):
                living = [entry for entry in row if self._waiting.get(entry[2]) is entry[4]]
                row.rebuild(living)
                if not living:
                    row.offer = None
                    del rows[group]
        self._entries = alive

    def peek(self) -> tuple[Entry, Gate] | None:
        """Return the first entry of the open gates, with its gate."""
        heads = self._heads
        while heads:
            offer = heads[0]
            row, entry = offer[4], offer[5]
            if row.offer is not offer or row.gate.closed_by:
                heappop(heads)
            elif self._waiting.get(entry[2]) is entry[4]:
                return entry, row.gate
            elif (head := self._head(row)) is None:
                heappop(heads)
                del self._rows[row.gate][row.group]
            else:
                row.offer = (head[0], head[1], head[2], row.serial, row, head)
                heapreplace(heads, row.offer)
        return None

    def firsts(self, most: int) -> Iterator[Task]:
        """Yield the first task behind each gate, open or closed, of so many gates at most."""
        for rows in islice(self._rows.values(), most):
            heads = [head for row in rows.values() if (head := self._head(row)) is not None]
            if heads:
                yield min(heads)[4]

    def pop(self) -> tuple[Entry, Gate] | None:
        """Take out what `peek` returns, and offer the next of its row."""
        head = self.peek()
        if head is None:
            return None
        row = self._heads[0][4]
        row.drop_first()
        self._entries -= 1
        following = row.first()
        if following is None:
            heappop(self._heads)
            del self._rows[row.gate][row.group]
        else:
            row.offer = (following[0], following[1], following[2], row.serial, row, following)
            heapreplace(self._heads, row.offer)
        return head

    def _row(self, gate: Gate, group: int) -> Row:
        rows = self._rows.get(gate)
        if rows is None:
            rows = self._rows[gate] = {}
        row = rows.get(group)
        if row is None:
            row = rows[group] = Row(gate, group, next(self._pushes))
        return row

    def _head(self, row: Row) -> Entry | None:
        waiting = self._waiting
        while (entry := row.first()) is not None:
            if waiting.get(entry[2]) is entry[4]:
                return entry
            row.drop_first()
            self._entries -= 1
        return None

    def _offer(self, row: Row, head: Entry) -> None:
        row.offer = (head[0], head[1], head[2], row.serial, row, head)
        heappush(self._heads, row.offer)
        if len(self._heads) > self._most_heads:
            self._drop_old_offers()

    def _drop_old_offers(self) -> None:
        self._heads = [offer for offer in self._heads if offer[4].offer is offer]
        heapify(self._heads)
        self._most_heads = 2 * len(self._heads) + SLACK
