"""What work will cost, from what the same kind of work has cost before.

A kind of work is a project, a target or model, and an action. Each kind has a sketch of its costs
in dollars and one in tokens: a histogram with buckets of growing width, in which old costs count
less and less. Only costs that somebody reported, or that were priced from a provider's answer, are
fed to it; an assumed cost would only repeat the estimate that it came from.

`Estimates.hold` says what an attempt is to hold, unit by unit, in this order: the estimate that it
came with; a learned quantile; the default of its target; and where none of these is known a probe,
whose amount the ledger works out from the limits that it finds.

An estimate may also be a claim, of somebody whose word is not taken as given. It raises what is
held, and lowers it to no less than the median of its kind; what bounds work of which little is
known bounds it as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import ceil, floor, log
from typing import NamedTuple

import msgspec

from headgate.core.budgets.ledger import Flexible, HoldRule, RoomNeeded, Unit, room_needed
from headgate.core.enums import FastEnum
from headgate.core.money import MAX_RESERVATION_MICRO_USD, MAX_RESERVATION_TOKENS, amount_of

MAX_KINDS = 1_000
"""How many kinds of work are known of a project; the one that was fed longest ago goes first."""

FEW_SAMPLES = 20
"""With fewer samples than these nothing is known of the tail, so the largest one counts."""

MANY_SAMPLES = 256
LATE_SAMPLES = 16
"""With so many samples an estimate is made anew after so many more, and whenever one is above."""

DEFAULT_QUANTILE = 0.95
SILENT_AFTER = 3
"""After so many successes without a number, a kind counts as one that reports nothing.

After as many that cost nothing, and none that cost more, it counts as one that costs nothing.
"""

_GROWTH = log(1.05)
_WEIGHT = 16
_MOST_WEIGHT = 1_024 * _WEIGHT
"""Beyond this all weights are halved: what came before the last thousand samples fades."""

_CEILINGS: dict[Unit, int] = {
    Unit.MICRO_USD: MAX_RESERVATION_MICRO_USD,
    Unit.TOKENS: MAX_RESERVATION_TOKENS,
}


class Kind(NamedTuple):
    """A kind of work. Without an action it is all work of a target; without a project, of all."""

    project_id: str
    name: str
    action: str = ""

    def levels(self) -> tuple[Kind, ...]:
        """Return the kinds that tell something of this one, the closest first."""
        everywhere = Kind("", self.name)
        if not self.action:
            return self, everywhere
        return self, Kind(self.project_id, self.name), everywhere

    @property
    def text(self) -> str:
        """The kind as one text, which no other kind has."""
        if "%" in self.project_id or "/" in self.project_id or "%" in self.name or "/" in self.name:
            return "/".join([part.replace("%", "%25").replace("/", "%2F") for part in self])
        action = self.action.replace("%", "%25").replace("/", "%2F") if self.action else ""
        return f"{self.project_id}/{self.name}/{action}"


class SilentKind(NamedTuple):
    """Work that succeeds without saying what it used in a unit, so that no budget sees it."""

    kind: Kind
    unit: Unit

    @property
    def is_tokens(self) -> bool:
        """Whether it is about tokens, and not about dollars."""
        return self.unit is Unit.TOKENS

    @property
    def problem(self) -> str:
        """What it does to budgets."""
        return (
            f"reports no {_WORDS[self.unit]} in project {self.kind.project_id}: its cost is not"
            f" booked, and after {SILENT_AFTER} such tasks it reserves nothing"
        )

    @property
    def advice(self) -> str:
        """The line to add."""
        name = msgspec.json.encode(self.kind.name).decode()
        key = "estimate_tokens" if self.is_tokens else "estimate_usd"
        said = "`usage`" if self.is_tokens else "`usage` with a `model` that has a price"
        return f"add {key} = … to [targets.{name}], or let its responses report {said}"


class Basis(FastEnum):
    """How the amount that is held for an attempt came about."""

    GIVEN = "given"
    FREE = "free"
    LEARNED = "learned"
    CONFIGURED = "configured"
    PROBE = "probe"
    SILENT = "silent"
    CLAIMED = "claimed"


class Reserve(FastEnum):
    """How careful a learned amount is: a quantile, or the most that was seen."""

    EXPECTED = "expected"
    STRICT = "strict"


class Sketch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A histogram of amounts whose buckets grow by a twentieth, with a weight for each.

    `count` is the number of samples, and `silent` how many successes in a row came without one.
    """

    count: int = 0
    largest: int = 0
    weights: dict[int, int] = {}
    silent: int = 0

    def add(self, amount: int, *, is_overrun: bool = False) -> None:
        """Add a sample; one that was above what was held counts twice, to widen the sketch."""
        bucket = _bucket(amount)
        added = 2 * _WEIGHT if is_overrun else _WEIGHT
        self.count += 1
        self.silent = 0
        self.largest = max(self.largest, amount)
        self.weights[bucket] = self.weights.get(bucket, 0) + added
        # Adding up all weights costs more than the rest, and nothing depends on a few more.
        if self.count % 16 == 0 and sum(self.weights.values()) > _MOST_WEIGHT:
            halved = {at: weight // 2 for at, weight in self.weights.items()}
            self.weights = {at: weight for at, weight in halved.items() if weight}
            self.largest = min(self.largest, _upper_edge(max(self.weights)))

    def miss(self) -> None:
        """Note a success that came without a number."""
        self.silent += 1

    @property
    def is_silent(self) -> bool:
        """Whether this kind of work succeeds without ever saying what it used."""
        return self.is_silent_since(SILENT_AFTER)

    def is_silent_since(self, least: int) -> bool:
        """Tell whether so many successes, or more, are all that is known."""
        return not self.count and self.silent >= least

    @property
    def is_known(self) -> bool:
        """Whether an amount can be learned from it; one that cost nothing may be an exception."""
        return self.largest > 0 or self.count >= SILENT_AFTER

    def quantile(self, share: float) -> int:
        """Return an amount that so much of the weight does not exceed; 0 without samples."""
        wanted = share * sum(self.weights.values())
        passed = 0
        for bucket in sorted(self.weights):
            passed += self.weights[bucket]
            if passed >= wanted:
                return min(_upper_edge(bucket), self.largest)
        return self.largest

    def amount(self, share: float, reserve: Reserve) -> int:
        """Return what one more of the kind is to hold; the fewer samples, the wider the margin."""
        is_wide = reserve is Reserve.STRICT or self.count < FEW_SAMPLES
        # Where most cost nothing a quantile is nothing, too, but not the mean.
        base = self.largest if is_wide else max(self.quantile(share), self._mean())
        # In whole numbers: (1 + 3/n) times the base, rounded up.
        return -(-base * (self.count + 3) // self.count)

    def _mean(self) -> int:
        total = sum(self.weights.values())
        summed = sum(_upper_edge(at) * weight for at, weight in self.weights.items())
        return min(summed // total, self.largest)


@lru_cache(maxsize=4_096)
def _bucket(amount: int) -> int:
    return 0 if amount <= 0 else 1 + floor(log(amount) / _GROWTH)


def _upper_edge(bucket: int) -> int:
    return 0 if bucket == 0 else ceil(1.05**bucket)


class Learned(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is known of one kind of work, in both units."""

    micro_usd: Sketch = msgspec.field(default_factory=Sketch)
    tokens: Sketch = msgspec.field(default_factory=Sketch)

    def sketch(self, unit: Unit) -> Sketch:
        """Return what is known in one unit."""
        return self.tokens if unit is Unit.TOKENS else self.micro_usd


def believed(claimed: int | None, *, held: int) -> int | None:
    """Return how much of a tenant's claim is learned: no more than was held.

    Otherwise one claim would make its kind of work too dear for every budget. Holds are a margin
    above what is learned, so costs that do grow are known after some attempts. Where nothing was
    held nobody is limited.
    """
    return min(claimed, held) if claimed and held else claimed


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt used, as far as it was reported or priced; None is unknown.

    `is_priced` tells of a cost that was priced from a provider's answer, `is_done` of a success,
    and the units in `probed` were held without knowing anything.
    """

    micro_usd: int | None = None
    tokens: int | None = None
    held_micro_usd: int = 0
    held_tokens: int = 0
    is_priced: bool = False
    is_done: bool = False
    probed: tuple[Unit, ...] = ()

    def feed(self, learned: Learned, *, is_own: bool) -> None:
        """Add to what is known of a kind; that it says nothing is known of its own kind alone."""
        dollars, tokens, is_done = self.micro_usd, self.tokens, self.is_done
        if dollars is not None:
            if dollars or is_done:
                learned.micro_usd.add(dollars, is_overrun=0 < self.held_micro_usd < dollars)
        elif is_own and is_done and Unit.MICRO_USD in self.probed:
            learned.micro_usd.miss()
        if tokens is not None:
            if tokens or is_done:
                learned.tokens.add(tokens, is_overrun=0 < self.held_tokens < tokens)
        elif is_own and is_done and Unit.TOKENS in self.probed:
            learned.tokens.miss()

    def _tells(self, used: int | None) -> bool:
        # Nothing used, by work that failed, says nothing of what a success costs.
        return used is not None and bool(used or self.is_done)

    def _is_missing(self, unit: Unit, used: int | None) -> bool:
        return used is None and self.is_done and unit in self.probed

    @property
    def says_something(self) -> bool:
        """Whether there is anything to learn from it."""
        if self.is_done and self.tokens is not None:
            return True
        if self._tells(self.tokens) or self._tells(self.micro_usd):
            return True
        if not self.probed:
            return False
        units = ((Unit.MICRO_USD, self.micro_usd), (Unit.TOKENS, self.tokens))
        return any(self._is_missing(unit, used) for unit, used in units)

    def kinds(self, kind: Kind) -> tuple[Kind, ...]:
        """Return the kinds that learn from it; only priced costs are shared between projects."""
        levels = kind.levels()
        return levels if self.is_priced else tuple([one for one in levels if one.project_id])


class Estimate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an attempt is to hold in one unit, and how that came about.

    `most` is the most that this kind of work has cost, and `samples` how many costs it was learned
    from. At most so many `at_once` may be in flight; 0 is no such bound. One that `is_others` was
    learned from other work of its target. `claimed` is what a submitter said of it whose word is
    not taken as given. Of a call `likely` is what half of those like it would cost.
    """

    basis: Basis
    amount: int = 0
    most: int = 0
    samples: int = 0
    quantile: float = 0.0
    at_once: int = 0
    is_others: bool = False
    claimed: int | None = None
    likely: int = 0

    def sentence(self, held: int, unit: Unit) -> str:
        """Say what is held and why: `reserved $0.031, 95% of 412 of its kind cost less`."""
        return self._said("reserved", held, unit)

    def prospect(self, unit: Unit) -> str:
        """Say what a task that waits would hold, and why."""
        if self.basis is Basis.PROBE:
            share = f"a tenth of the smallest limit in {_WORDS[unit]}"
            return f"would reserve a probe, {share}: {_UNKNOWN}"
        return self._said("would reserve", self.amount, unit)

    def _said(self, verb: str, amount: int, unit: Unit) -> str:
        held = f"{verb} {amount_of(amount, unit.value)}"
        match self.basis:
            case Basis.LEARNED if self.amount == self.claimed:
                return f"{held}, the estimate that it came with"
            case Basis.LEARNED if self.quantile:
                return f"{held}, {100 * self.quantile:g}% of {self.samples} of its kind cost less"
            case Basis.LEARNED:
                most = f"the highest cost of {self.samples} of its kind"
                return f"{held}, {_times(amount, self.most)}{most}"
            case Basis.CONFIGURED:
                return f"{held}, the estimate of its target"
            case Basis.PROBE:
                return f"{held}, a probe: {_UNKNOWN}"
            case Basis.SILENT:
                return "reserves nothing: this kind of work never reports what it used"
            case Basis.FREE:
                return "costs nothing by definition"
            case _:
                return f"{held}, the estimate that it came with"


def _times(amount: int, most: int) -> str:
    """Say how many times the highest cost an amount is; the ledger may have shrunk its margin."""
    times = round(amount / most, 2) if amount > most > 0 else 1
    if times == 1:
        return ""
    return "twice " if times == 2 else f"{times:g} times "  # noqa: PLR2004


_UNKNOWN = "the cost of this kind of work is unknown"
_WORDS = {Unit.MICRO_USD: "dollars", Unit.TOKENS: "tokens"}
NOTHING = Estimate(basis=Basis.FREE)
PROBE = Estimate(basis=Basis.PROBE, at_once=1)
SILENT = Estimate(basis=Basis.SILENT)
_RULES = {Basis.PROBE: HoldRule.PROBE, Basis.LEARNED: HoldRule.LEARNED}


class Hold(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an attempt at a kind of work is to hold in both units."""

    micro_usd: Estimate
    tokens: Estimate
    kind: str = ""

    def estimate(self, unit: Unit) -> Estimate:
        """Return the estimate of one unit."""
        return self.tokens if unit is Unit.TOKENS else self.micro_usd

    @property
    def flexible(self) -> Flexible | None:
        """What the ledger may work out by itself; None where both amounts are fixed."""
        usd = _RULES.get(self.micro_usd.basis, HoldRule.EXACT)
        tokens = _RULES.get(self.tokens.basis, HoldRule.EXACT)
        is_bounded = self.micro_usd.at_once or self.tokens.at_once
        if usd is HoldRule.EXACT and tokens is HoldRule.EXACT and not is_bounded:
            return None
        return Flexible(
            micro_usd=usd,
            tokens=tokens,
            most_micro_usd=self.micro_usd.most,
            most_tokens=self.tokens.most,
            kind=self.kind,
            micro_usd_at_once=self.micro_usd.at_once,
            tokens_at_once=self.tokens.at_once,
            likely_micro_usd=self.micro_usd.likely,
            likely_tokens=self.tokens.likely,
        )

    def room_needed(self, unit: Unit, limit: int, *, is_shared: bool) -> RoomNeeded:
        """Return what must be left of a limit; with `is_shared` others hold some of it."""
        asked = self.estimate(unit).amount
        return room_needed(asked, self.flexible, unit, limit=limit, is_shared=is_shared)

    @property
    def waiting_kind(self) -> str:
        """The kind that it may have to wait for; none where both amounts are fixed."""
        return "" if self.flexible is None else self.kind

    @property
    def is_worth_keeping(self) -> bool:
        """Whether it says more than that the amounts were given."""
        plain = (Basis.GIVEN, Basis.FREE)
        return self.micro_usd.basis not in plain or self.tokens.basis not in plain

    @property
    def probed(self) -> tuple[Unit, ...]:
        """The units of which nothing is known."""
        both = ((Unit.MICRO_USD, self.micro_usd), (Unit.TOKENS, self.tokens))
        unknown = (Basis.PROBE, Basis.SILENT)
        return tuple([unit for unit, one in both if one.basis in unknown or one.is_others])


def kept_hold(hold: Hold | None, *, tokens: int, micro_usd: int) -> Hold | None:
    """Return what is kept of how the amounts came about that an attempt holds now.

    What it came with is kept anyway, and a probe where nothing is limited has told nothing.
    """
    if hold is None:
        return None
    usd = hold.micro_usd if micro_usd or hold.micro_usd.basis is Basis.SILENT else NOTHING
    other = hold.tokens if tokens or hold.tokens.basis is Basis.SILENT else NOTHING
    kept = Hold(micro_usd=usd, tokens=other)
    return kept if kept.is_worth_keeping else None


def given(amount: int) -> Estimate:
    """Return the estimate that an attempt came with."""
    return Estimate(basis=Basis.GIVEN, amount=amount)


def claimed(amount: int) -> Estimate:
    """Return the estimate that an attempt came with, from somebody who may be wrong on purpose."""
    return Estimate(basis=Basis.CLAIMED, amount=amount, claimed=amount)


def configured(amount: int | None) -> Estimate | None:
    """Return the default of a target, None where it has none."""
    return None if amount is None else Estimate(basis=Basis.CONFIGURED, amount=amount)


class Estimates:
    """All kinds of work that are known, at most so many of each project."""

    def __init__(self, rows: Iterable[tuple[Kind, Learned]] = (), *, most: int = MAX_KINDS) -> None:
        """Begin with what was kept, the kinds that were fed longest ago first."""
        self._most = most
        self._known: dict[str, dict[Kind, Learned]] = {}
        self._actions: dict[tuple[str, str], int] = {}
        self._found: dict[Kind, dict[tuple[object, ...], Estimate]] = {}
        for kind, learned in rows:
            self._known.setdefault(kind.project_id, {})[kind] = learned
            self._count_action(kind)

    def get(self, kind: Kind) -> Learned | None:
        """Return what is known of exactly this kind."""
        known = self._known.get(kind.project_id)
        return None if known is None else known.get(kind)

    def feed(self, kind: Kind, sample: Sample) -> None:
        """Learn from an attempt that ended."""
        if not sample.says_something:
            return
        for one in sample.kinds(kind):
            known = self._known.get(one.project_id)
            if known is None:
                known = self._known[one.project_id] = {}
            learned = known.pop(one, None)
            if learned is None:
                learned = Learned()
                while len(known) >= self._most:
                    self._forget(known, next(iter(known)))
                self._count_action(one)
            # The last one in is the one that was fed last.
            known[one] = learned
            if not _says_little(sample, learned):
                self._found.pop(one, None)
            sample.feed(learned, is_own=one == kind)

    def silent_kinds(self, least: int = SILENT_AFTER) -> list[SilentKind]:
        """Return the targets whose work succeeds without saying what it used, each once.

        `least` is after how many such successes.
        """
        found = [
            SilentKind(Kind(kind.project_id, kind.name), unit)
            for known in self._known.values()
            for kind, learned in known.items()
            for unit in Unit
            if learned.sketch(unit).is_silent_since(least)
        ]
        return list(dict.fromkeys(found))

    def hold(
        self,
        kind: Kind,
        *,
        micro_usd: Estimate | None,
        tokens: Estimate | None,
        default_micro_usd: Estimate | None = None,
        default_tokens: Estimate | None = None,
        quantile: float = DEFAULT_QUANTILE,
        reserve: Reserve = Reserve.EXPECTED,
    ) -> Hold:
        """Return what an attempt at a kind of work is to hold; None is what nobody gave.

        A claim counts beside what would be held without it.
        """
        units = (
            (Unit.MICRO_USD, micro_usd, default_micro_usd),
            (Unit.TOKENS, tokens, default_tokens),
        )
        found: list[Estimate] = []
        for unit, said, default in units:
            if said is not None and said.basis is not Basis.CLAIMED:
                found.append(said)
                continue
            without = self._unknown(kind, unit, default, quantile, reserve)
            if said is not None:
                least = self._least(without, kind, unit, default)
                without = _beside_claim(without, said.amount, least)
            found.append(without)
        is_probe = any(one.basis is Basis.PROBE for one in found)
        counted = Kind(kind.project_id, kind.name) if is_probe else kind
        return Hold(micro_usd=found[0], tokens=found[1], kind=counted.text)

    def estimate(self, kind: Kind, unit: Unit, *, reserve: Reserve) -> Estimate:
        """Return what an attempt at a kind of work is to hold in a unit of which nobody spoke."""
        return self._unknown(kind, unit, None, DEFAULT_QUANTILE, reserve)

    def _unknown(
        self, kind: Kind, unit: Unit, default: Estimate | None, quantile: float, reserve: Reserve
    ) -> Estimate:
        """Return the estimate of a unit for which nobody gave one."""
        own = self.get(kind)
        if own is not None:
            sketch = own.tokens if unit is Unit.TOKENS else own.micro_usd
            if default is None and sketch.is_silent:
                return SILENT
            if sketch.is_known:
                found = self._from(kind, kind, sketch, unit, quantile, reserve)
                return found if default is None else _beside_default(found, default)
        for level in kind.levels()[1:]:
            learned = self.get(level)
            if learned is not None and learned.sketch(unit).is_known:
                found = self._from(level, kind, learned.sketch(unit), unit, quantile, reserve)
                return found if default is None else _beside_default(found, default)
        return PROBE if default is None else default

    def _least(self, without: Estimate, kind: Kind, unit: Unit, default: Estimate | None) -> int:
        """Return the least that is held of a kind, whatever somebody claims.

        It is the median, unless there is none of its own, or so few costs that a target's default
        still counts beside them.
        """
        is_strange = without.is_others and self._actions.get(kind[:2], 0) < FEW_SAMPLES
        if without.basis is not Basis.LEARNED or is_strange:
            return without.amount
        least = self.median(kind, unit)
        if default is not None and without.samples < FEW_SAMPLES:
            least = max(least, default.amount)
        return min(least, without.amount)

    def median(self, kind: Kind, unit: Unit) -> int:
        """Return what half of the work of a kind does not exceed; 0 where nothing is known."""
        for level in kind.levels():
            learned = self.get(level)
            if learned is None or not learned.sketch(unit).is_known:
                continue
            known = self._found.setdefault(level, {})
            estimate = known.get((unit,))
            if estimate is None:
                half = learned.sketch(unit).quantile(0.5)
                estimate = Estimate(basis=Basis.LEARNED, amount=min(half, _CEILINGS[unit]))
                known[(unit,)] = estimate
            return estimate.amount
        return 0

    def _from(
        self, level: Kind, kind: Kind, sketch: Sketch, unit: Unit, quantile: float, reserve: Reserve
    ) -> Estimate:
        """Return the estimate from what is known of a kind, or of a coarser one.

        Others of its target say little of an action that nobody has seen. So it holds the most that
        any of them has cost, and the first of it runs alone; unless they were so many different
        ones that a further one is like them.
        """
        is_own = level == kind
        is_strange = not is_own and self._actions.get(kind[:2], 0) < FEW_SAMPLES
        known = self._found.get(level)
        if known is None:
            known = self._found[level] = {}
        key = (unit, quantile, reserve, is_strange)
        estimate = known.get(key)
        if estimate is None:
            care = Reserve.STRICT if is_strange else reserve
            estimate = _learned(sketch, unit, quantile, care)
            if is_strange:
                estimate = msgspec.structs.replace(estimate, at_once=1)
            known[key] = estimate
        return estimate if is_own else msgspec.structs.replace(estimate, is_others=True)

    def _count_action(self, kind: Kind) -> None:
        if kind.action:
            self._actions[kind[:2]] = self._actions.get(kind[:2], 0) + 1

    def _forget(self, known: dict[Kind, Learned], kind: Kind) -> None:
        del known[kind]
        self._found.pop(kind, None)
        left = self._actions.pop(kind[:2], 0) - bool(kind.action)
        if left > 0:
            self._actions[kind[:2]] = left


def _says_little(sample: Sample, learned: Learned) -> bool:
    """Tell whether estimates may stay as they are: one more of many changes next to nothing."""
    for sketch, used, held in (
        (learned.tokens, sample.tokens, sample.held_tokens),
        (learned.micro_usd, sample.micro_usd, sample.held_micro_usd),
    ):
        if used is None:
            if sketch.silent:
                return False
            continue
        is_known = sketch.count >= MANY_SAMPLES and sketch.count % LATE_SAMPLES > 0
        if not is_known or used > sketch.largest or 0 < held < used:
            return False
    return True


def _beside_claim(without: Estimate, said: int, least: int) -> Estimate:
    """Return what is held for a claim, beside what would be held without it.

    How many may be in flight of what is little known depends on no claim: whoever claims a little
    more than the first one cost would otherwise have all others start at once.
    """
    if without.basis is Basis.PROBE:
        return msgspec.structs.replace(without, amount=said, claimed=said)
    if said > without.amount:
        return msgspec.structs.replace(
            without, basis=Basis.CLAIMED, amount=said, claimed=said, quantile=0.0
        )
    amount = max(said, least)
    quantile = without.quantile if amount == without.amount else 0.5
    return msgspec.structs.replace(without, amount=amount, claimed=said, quantile=quantile)


def _beside_default(found: Estimate, default: Estimate) -> Estimate:
    """Return what a target with a default holds: no less, and few samples bind it no more."""
    if not found.at_once:
        return found
    return default if found.amount < default.amount else msgspec.structs.replace(found, at_once=0)


def _learned(sketch: Sketch, unit: Unit, quantile: float, reserve: Reserve) -> Estimate:
    is_quantile = reserve is Reserve.EXPECTED and sketch.count >= FEW_SAMPLES
    return Estimate(
        basis=Basis.LEARNED,
        amount=min(sketch.amount(quantile, reserve), _CEILINGS[unit]),
        most=min(sketch.largest, _CEILINGS[unit]),
        samples=sketch.count,
        quantile=quantile if is_quantile else 0.0,
        at_once=2 * sketch.count if sketch.count < FEW_SAMPLES else 0,
    )
