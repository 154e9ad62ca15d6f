"""Gates: what must be open before a task can start.

A gate is the set of things that a task passes through: its budget scopes with all their
ancestors, what these have left for its project, its kind of work, its target, its slot or the
provider whose slots it may use, what its project may use of these, and where it can run: on the
nodes of the service, if it is to be pulled at a worker of its agent, or, if it is a call, at its
upstream. Tasks with the same gate are held together, so that a closed one costs nothing however
many tasks stand behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import count
from math import inf
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec

from headgate.core.budgets.ledger import Refused, Unit
from headgate.core.budgets.scopes import ROOT, Scope, ancestors
from headgate.core.task import Task

GateKind = Literal[
    "scope",
    "room",
    "kind",
    "target",
    "slot",
    "provider",
    "grant",
    "agent",
    "worker",
    "node",
    "task",
    "upstream",
]


ClosureCause = Literal[
    "", "worker", "target", "provider", "credit", "operator", "settings", "budget", "rate"
]
"""Who closed a part: a worker's word, a target's or a provider's answer, a provider whose credit is
used up, somebody by hand, the settings, a budget without room, or a rate limit."""


class GatePart(NamedTuple):
    """One thing that can be closed, such as the scope `session:eval` or the slot `work`."""

    kind: GateKind
    name: str


class GateClosure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a part is closed, and the Unix seconds at which it may open, where that is known."""

    kind: GateKind
    """`scope`, `target`, `slot` or `provider`."""
    name: str
    """Which one. The scope `""` is the root and closes everything."""
    until: float | None = None
    """Unix seconds at which it may open, if known."""
    why: str = ""
    """For people."""
    cause: ClosureCause = ""
    """Who closed it: `worker`, `target`, `provider`, `credit`, `operator`, `settings`, `budget` or
    `rate`. It changes no plan."""
    by: str = ""
    """The worker, target or scope that did."""
    task_id: str = ""
    """The task that met with it."""
    since: float | None = None
    """Unix seconds at which it was closed."""

    @property
    def part(self) -> GatePart:
        """The part that this closes."""
        return GatePart(self.kind, self.name)

    @property
    def opens_at(self) -> float:
        """When it may open; one that names no time opens last."""
        return inf if self.until is None else self.until


NODES = GatePart("node", "")
"""What tasks pass through that run on the nodes of the service."""

ANY_WORKER = GatePart("worker", "")
"""What tasks pass through that any agent with a worker may take."""

TASKS = GatePart("task", "")
"""What everything passes through that counts as a task in flight: all but calls."""

OFFERED = frozenset(("node", "worker", "task", "upstream"))
"""The kinds whose parts are open while permits are offered; nobody closes them by a closure."""

GateKey = tuple[
    str,
    str | None,
    str | None,
    tuple[str, ...] | None,
    str | None,
    str | None,
    tuple[Unit, ...],
    bool,
]

Shut = Callable[[GatePart], "GateClosure | None"]
"""Says whether a part of an offered kind is closed now."""


def gate_key(task: Task, pull_targets: frozenset[str] = frozenset()) -> GateKey:
    """Return what tasks of the same gate have in common.

    The fourth are their scopes, or None for those that no budget keeps out. The fifth is who may
    pull them, the seventh are the units for which nobody gave an estimate, and the last tells
    whether they are calls.
    """
    puller = (task.agent_id or "") if task.target in pull_targets else None
    has_tokens = task.estimate_tokens is not None and not task.has_claims
    if task.has_usd_estimate:
        unknown = _NONE if has_tokens else _TOKENS
    else:
        unknown = _DOLLARS if has_tokens else _BOTH
    return (
        task.project_id,
        task.target,
        task.slot,
        task.scopes if task.is_bound_by_budgets else None,
        puller,
        task.provider,
        unknown,
        task.is_call,
    )


_NONE: tuple[Unit, ...] = ()
_TOKENS, _DOLLARS, _BOTH = (Unit.TOKENS,), (Unit.MICRO_USD,), (Unit.MICRO_USD, Unit.TOKENS)


class KindPart(NamedTuple):
    """What is too little known of: work of a project at a target, in a unit that a scope limits.

    Calls wait for those of their own `kind`, which goes by the model.
    """

    project_id: str
    target: str
    unit: str
    scope: str
    kind: str = ""

    @property
    def part(self) -> GatePart:
        """What closes while the first of it are in flight."""
        return GatePart("kind", _name_of(self))


class RoomPart(NamedTuple):
    """What a scope has left, as far as a project asks for it: too little for some of its work."""

    project_id: str
    scope: str

    @property
    def part(self) -> GatePart:
        """What closes for one project, and leaves the scope open to all others."""
        return GatePart("room", f"{len(self.project_id)}:{self.project_id}{self.scope}")


def read_room_part(name: str) -> RoomPart:
    """Return what a part of this kind stands for."""
    length, _, names = name.partition(":")
    return RoomPart(names[: int(length)], names[int(length) :])


class GrantPart(NamedTuple):
    """What a project may use or not: the slot that its task names, or a slot of a provider."""

    project_id: str
    slot: str
    provider: str

    @property
    def part(self) -> GatePart:
        """What closes while the project may use none of it."""
        return GatePart("grant", _name_of(self))


def grant_of(task: Task) -> GrantPart:
    """Return what a task with a slot or a provider needs to be granted."""
    return GrantPart(task.project_id, task.slot or "", "" if task.slot else task.provider or "")


def read_grant_part(name: str) -> GrantPart:
    """Return what a part of this kind stands for."""
    return GrantPart(*msgspec.json.decode(name))


def scope_part(part: GatePart) -> GatePart:
    """Return the scope that a part is the room of; any other part is itself."""
    if part.kind != "room":
        return part
    return GatePart("scope", read_room_part(part.name).scope)


def known_by_name(closures: Iterable[GateClosure]) -> list[GateClosure]:
    """Return closures as people know them: a scope that is closed for some projects is closed once.

    One that is closed for all of them is that alone.
    """
    found = list(closures)
    if "room" not in map(_KIND, found):
        return found
    parts = set(map(_PART, found))
    rooms = {scope_part(one.part): one for one in found if one.kind == "room"}
    return [one for one in found if one.kind != "room"] + [
        msgspec.structs.replace(one, kind=part.kind, name=part.name)
        for part, one in rooms.items()
        if part not in parts
    ]


# There may be thousands of closures, and a call for each would take milliseconds.
_KIND, _PART = attrgetter("kind"), attrgetter("kind", "name")


def read_kind_part(name: str) -> KindPart:
    """Return what a part of this kind stands for."""
    return KindPart(*msgspec.json.decode(name))


@lru_cache(maxsize=4_096)
def _name_of(part: KindPart | GrantPart) -> str:
    return msgspec.json.encode(tuple(part)).decode()


def kind_part(task: Task, refused: Refused) -> GatePart:
    """Return what closes for a task that is not the first of its kind."""
    kind = refused.kind if task.is_call else ""
    unit, scope = refused.unit.value, refused.scope
    return KindPart(task.project_id, task.target or "", unit, scope, kind).part


@lru_cache(maxsize=1_024)
def gate_parts(key: GateKey) -> frozenset[GatePart]:
    """List everything whose closing closes this gate.

    The root of the budget tree, the empty scope, stands above every task.
    """
    project_id, target, slot, scopes, puller, provider, unknown, is_call = key
    charged: set[Scope] = set()
    if scopes is not None:
        charged = {ROOT, *(above for scope in scopes for above in ancestors(Scope(scope)))}
    parts = {GatePart("scope", scope) for scope in charged}
    parts.update(RoomPart(project_id, scope).part for scope in charged)
    for unit in unknown:
        kinds = [KindPart(project_id, target or "", unit.value, scope) for scope in charged]
        parts.update(kind.part for kind in kinds)
    if target is not None:
        parts.add(GatePart("target", target))
    if slot is not None:
        parts.update((GatePart("slot", slot), GrantPart(project_id, slot, "").part))
    elif provider is not None:
        granted = GrantPart(project_id, "", provider)
        parts.update((GatePart("provider", provider), granted.part))
    if is_call:
        parts.add(GatePart("upstream", target or ""))
        return frozenset(parts)
    parts.add(TASKS)
    parts.add(NODES if puller is None else GatePart("worker", puller))
    if puller:
        parts.add(GatePart("agent", puller))
    return frozenset(parts)


@lru_cache(maxsize=1_024)
def offered_parts(key: GateKey) -> tuple[GatePart, ...]:
    """List the parts of a gate that are closed for want of a permit."""
    return tuple([part for part in gate_parts(key) if part.kind in OFFERED])


class Gate:
    """One gate of the index, with whatever closes it at the moment."""

    __slots__ = ("closed_by", "is_call", "is_pull", "key", "parts", "serial")

    def __init__(self, key: GateKey, serial: int) -> None:
        self.key = key
        self.serial = serial
        self.is_pull = key[4] is not None
        self.is_call = key[7]
        self.parts = gate_parts(key)
        self.closed_by: dict[GatePart, GateClosure] = {}


class GateTable:
    """All gates that tasks wait behind, and the parts that are closed."""

    __slots__ = ("_by_part", "_closures", "_gates", "_serials", "_shut")

    def __init__(self, shut: Shut = lambda _part: None) -> None:
        self._shut = shut
        self._gates: dict[GateKey, Gate] = {}
        self._by_part: dict[GatePart, dict[Gate, None]] = {}
        self._closures: dict[GatePart, GateClosure] = {}
        self._serials = count()

    def gate(self, key: GateKey) -> Gate:
        """Return the gate of this key, closed by whatever is closed now."""
        gate = self._gates.get(key)
        if gate is None:
            gate = self._gates[key] = Gate(key, next(self._serials))
            for part in gate.parts:
                self._by_part.setdefault(part, {})[gate] = None
                closure = self._closures.get(part)
                if closure is None and part.kind in OFFERED:
                    closure = self._shut(part)
                if closure is not None:
                    gate.closed_by[part] = closure
        return gate

    def is_open(self, key: GateKey) -> bool:
        """Tell whether the gate of this key is open, or would be if anybody waited behind it."""
        if self._closures and not self._closures.keys().isdisjoint(gate_parts(key)):
            return False
        for part in offered_parts(key):  # noqa: SIM110 - a generator costs more than the rest
            if self._shut(part) is not None:
                return False
        return True

    def of(self, part: GatePart) -> Iterable[Gate]:
        """Return the gates that have a part, closed by it or not."""
        return self._by_part.get(part, ())

    def behind(self, part: GatePart) -> list[Gate]:
        """Return the gates that a part closes now."""
        return [gate for gate in self._by_part.get(part, ()) if part in gate.closed_by]

    def drop(self, gate: Gate) -> None:
        """Forget a gate that nobody waits behind."""
        del self._gates[gate.key]
        for part in gate.parts:
            gates = self._by_part[part]
            del gates[gate]
            if not gates:
                del self._by_part[part]

    def close(self, closure: GateClosure) -> list[Gate]:
        """Close a part, and return the gates that were open until now."""
        if closure.kind not in OFFERED:
            self._closures[closure.part] = closure
        gates = self._by_part.get(closure.part, ())
        open_until_now = [gate for gate in gates if not gate.closed_by]
        for gate in gates:
            gate.closed_by[closure.part] = closure
        return open_until_now

    def open(self, part: GatePart) -> list[Gate]:
        """Open a part, and return the gates that are open from now on."""
        self._closures.pop(part, None)
        closed = [gate for gate in self._by_part.get(part, ()) if part in gate.closed_by]
        for gate in closed:
            del gate.closed_by[part]
        return [gate for gate in closed if not gate.closed_by]
