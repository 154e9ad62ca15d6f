"""Learned estimates: the sketch, the kinds, and what an attempt is to hold."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.budgets.ledger import HoldRule, Unit
from headgate.core.estimates import (
    FEW_SAMPLES,
    LATE_SAMPLES,
    MANY_SAMPLES,
    NOTHING,
    PROBE,
    SILENT_AFTER,
    Basis,
    Estimate,
    Estimates,
    Kind,
    Learned,
    Reserve,
    Sample,
    Sketch,
    believed,
    claimed,
    configured,
)
from headgate.core.estimates import given as given_estimate

KIND = Kind("alpha", "agent", "review")
COARSE = Kind("alpha", "agent")


def sketch_of(*amounts: int) -> Sketch:
    sketch = Sketch()
    for amount in amounts:
        sketch.add(amount)
    return sketch


def learned_from(*amounts: int, kind: Kind = KIND, is_priced: bool = False) -> Estimates:
    estimates = Estimates()
    for amount in amounts:
        estimates.feed(kind, Sample(micro_usd=amount, is_done=True, is_priced=is_priced))
    return estimates


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=300), st.floats(0.5, 0.999))
def test_a_quantile_is_at_most_a_twentieth_above_the_true_one(
    amounts: list[int], share: float
) -> None:
    found = sketch_of(*amounts).quantile(share)
    at_most = sum(amount <= found for amount in amounts)
    assert at_most >= share * len(amounts) * 0.999
    rank = min(len(amounts) - 1, int(share * len(amounts)))
    assert found <= max(sorted(amounts)[rank] * 1.06 + 1, 1)


def test_old_costs_fade_and_the_sketch_stays_small() -> None:
    draw = random.Random(18)
    sketch = Sketch()
    for _ in range(50_000):
        sketch.add(int(draw.lognormvariate(13, 1.2)))
    assert len(sketch.weights) < 300
    for _ in range(5_000):
        sketch.add(1_000)
    assert sketch.quantile(0.95) <= 1_050
    assert sketch.count == 55_000
    assert len(msgspec.json.encode(sketch)) < 200


def test_an_overrun_widens_the_sketch() -> None:
    plain, widened = Sketch(), Sketch()
    for number in range(100):
        amount = 1_000 if number % 25 else 9_000
        plain.add(amount)
        widened.add(amount, is_overrun=amount == 9_000)
    assert plain.quantile(0.95) < 1_100
    assert widened.quantile(0.95) > 8_000


@pytest.mark.parametrize(
    ("amounts", "expected", "at_once"),
    [
        ([100], 400, 2),
        ([100, 50], 250, 4),
        ([100] * 6, 150, 12),
        ([100] * 19, 116, 38),
        ([100] * 20, 115, 0),
        ([100] * 600, 101, 0),
    ],
)
def test_few_samples_hold_the_largest_with_a_margin_and_few_run_at_once(
    amounts: list[int], expected: int, at_once: int
) -> None:
    hold = learned_from(*amounts).hold(KIND, micro_usd=None, tokens=given_estimate(0))
    assert (hold.micro_usd.amount, hold.micro_usd.at_once) == (expected, at_once)
    flexible = hold.flexible
    assert flexible is not None
    assert (flexible.micro_usd, flexible.tokens) == (HoldRule.LEARNED, HoldRule.EXACT)


def test_strict_holds_the_largest_and_expected_a_quantile() -> None:
    estimates = learned_from(*[100] * 98, 5_000, 100)
    expected = estimates.hold(KIND, micro_usd=None, tokens=None).micro_usd
    strict = estimates.hold(KIND, micro_usd=None, tokens=None, reserve=Reserve.STRICT).micro_usd
    assert expected.amount < 200
    assert strict.amount == 5_150
    said = expected.sentence(31_000, Unit.MICRO_USD)
    assert said == "reserved $0.031, 95% of 100 of its kind cost less"
    assert expected.prospect(Unit.TOKENS).startswith("would reserve 1")
    assert PROBE.prospect(Unit.TOKENS) == (
        "would reserve a probe, a tenth of the smallest limit in tokens:"
        " the cost of this kind of work is unknown"
    )


@pytest.mark.parametrize(
    ("said", "samples", "default", "basis"),
    [
        (7, 3, 5, Basis.GIVEN),
        (0, 3, 5, Basis.GIVEN),
        (None, 3, 5, Basis.LEARNED),
        (None, 0, 5, Basis.CONFIGURED),
        (None, 0, 0, Basis.CONFIGURED),
        (None, 0, None, Basis.PROBE),
    ],
)
def test_the_order_in_which_an_estimate_is_found(
    said: int | None, samples: int, default: int | None, basis: Basis
) -> None:
    hold = learned_from(*[100] * samples).hold(
        KIND,
        micro_usd=None if said is None else given_estimate(said),
        tokens=None,
        default_micro_usd=configured(default),
    )
    assert hold.micro_usd.basis is basis
    assert hold.tokens.basis is Basis.PROBE


@pytest.mark.parametrize(
    ("fed", "is_priced", "asked", "is_known"),
    [
        (KIND, False, KIND, True),
        (KIND, False, Kind("alpha", "agent", "other"), True),
        (KIND, False, COARSE, True),
        (KIND, False, Kind("alpha", "elsewhere", "review"), False),
        (KIND, False, Kind("beta", "agent", "review"), False),
        (KIND, True, Kind("beta", "agent", "review"), True),
        (KIND, True, Kind("beta", "elsewhere", "review"), False),
    ],
)
def test_a_coarser_kind_crosses_projects_only_with_priced_costs(
    fed: Kind, is_priced: bool, asked: Kind, is_known: bool
) -> None:
    hold = learned_from(100, kind=fed, is_priced=is_priced).hold(asked, micro_usd=None, tokens=None)
    assert (hold.micro_usd.basis is Basis.LEARNED) == is_known


def test_the_closest_kind_counts() -> None:
    estimates = learned_from(*[100] * 50)
    other = Kind("alpha", "agent", "train")
    estimates.feed(other, Sample(micro_usd=9_000, is_done=True))
    assert estimates.hold(other, micro_usd=None, tokens=None).micro_usd.amount == 36_000
    assert estimates.hold(KIND, micro_usd=None, tokens=None).micro_usd.amount < 120


def test_a_kind_that_never_reports_runs_in_parallel_until_it_does() -> None:
    estimates = Estimates()
    for number in range(SILENT_AFTER):
        hold = estimates.hold(KIND, micro_usd=None, tokens=None)
        assert hold.micro_usd.basis is Basis.PROBE, number
        estimates.feed(KIND, Sample(is_done=True, probed=hold.probed))
    assert estimates.hold(KIND, micro_usd=None, tokens=None).micro_usd.basis is Basis.SILENT
    assert estimates.hold(KIND, micro_usd=None, tokens=None).flexible is None
    assert (COARSE, Unit.MICRO_USD) in estimates.silent_kinds()
    estimates.feed(KIND, Sample(micro_usd=100, is_done=True))
    hold = estimates.hold(KIND, micro_usd=None, tokens=None)
    assert (hold.micro_usd.basis, hold.tokens.basis) == (Basis.LEARNED, Basis.SILENT)


@pytest.mark.parametrize(
    "sample",
    [
        Sample(),
        Sample(is_done=True),
        Sample(probed=(Unit.MICRO_USD,)),
        Sample(micro_usd=0),
    ],
)
def test_what_says_nothing_teaches_nothing(sample: Sample) -> None:
    estimates = Estimates()
    for _ in range(FEW_SAMPLES):
        estimates.feed(KIND, sample)
    assert estimates.hold(KIND, micro_usd=None, tokens=None).micro_usd.basis is Basis.PROBE


def test_the_kind_fed_longest_ago_goes_first() -> None:
    estimates = Estimates(most=3)
    for name in ("a", "b", "a", "c", "d"):
        estimates.feed(Kind("alpha", name), Sample(micro_usd=1, is_done=True))
    assert estimates.get(Kind("alpha", "b")) is None
    for name in ("a", "c", "d"):
        assert estimates.get(Kind("alpha", name)) is not None
    estimates.feed(Kind("beta", "b"), Sample(micro_usd=1, is_done=True))
    assert estimates.get(Kind("alpha", "a")) is not None


def test_a_strange_action_runs_alone_until_many_actions_are_known() -> None:
    estimates = learned_from(*[100] * 50)
    estimates.feed(Kind("alpha", "agent", "dear"), Sample(micro_usd=700, is_done=True))
    strange = estimates.hold(Kind("alpha", "agent", "strange"), micro_usd=None, tokens=None)
    assert (strange.micro_usd.amount, strange.micro_usd.at_once) == (742, 1)
    for number in range(FEW_SAMPLES):
        one = Kind("alpha", "agent", f"action-{number}")
        estimates.feed(one, Sample(micro_usd=100, is_done=True))
    plain = estimates.hold(Kind("alpha", "agent", "strange"), micro_usd=None, tokens=None)
    assert plain.micro_usd.at_once == 0
    assert plain.micro_usd.amount < 150


def test_silent_work_beside_work_that_reports_becomes_silent() -> None:
    estimates = learned_from(*[100] * 5)
    click = Kind("alpha", "agent", "click")
    for _ in range(SILENT_AFTER):
        hold = estimates.hold(click, micro_usd=None, tokens=given_estimate(0))
        assert (hold.micro_usd.is_others, hold.probed) == (True, (Unit.MICRO_USD,))
        estimates.feed(click, Sample(is_done=True, probed=hold.probed))
    hold = estimates.hold(click, micro_usd=None, tokens=given_estimate(0))
    assert hold.micro_usd.basis is Basis.SILENT


def test_a_default_lifts_the_bound_of_few_samples() -> None:
    estimates = learned_from(100)
    for default, amount in ((50, 400), (900, 900)):
        hold = estimates.hold(
            KIND, micro_usd=None, tokens=None, default_micro_usd=configured(default)
        )
        assert (hold.micro_usd.amount, hold.micro_usd.at_once) == (amount, 0)


def test_where_most_cost_nothing_the_mean_is_held() -> None:
    estimates = learned_from(*[0] * 96, *[1_000] * 4)
    held = estimates.hold(KIND, micro_usd=None, tokens=None).micro_usd.amount
    assert 40 <= held <= 50


def test_the_largest_fades_with_the_others() -> None:
    sketch = sketch_of(10**9, *[100] * 20_000)
    assert sketch.largest < 200


def test_targets_and_their_actions_make_room_in_any_order() -> None:
    estimates = Estimates(most=3)
    for number in range(20):
        one = Kind("alpha", f"target-{number // 3}", f"action-{number}")
        estimates.feed(one, Sample(micro_usd=1, is_done=True))
    last = estimates.hold(Kind("alpha", "target-6", "strange"), micro_usd=None, tokens=None)
    assert last.micro_usd.at_once == 1


def test_what_is_kept_is_read_back() -> None:
    estimates = learned_from(100, 200, 300)
    kept = estimates.get(KIND)
    assert kept is not None
    again = msgspec.json.decode(msgspec.json.encode(kept), type=Learned)
    assert again == kept
    assert Estimates([(KIND, again)]).hold(KIND, micro_usd=None, tokens=None).micro_usd == Estimate(
        basis=Basis.LEARNED, amount=600, most=300, samples=3, at_once=6
    )


def test_kinds_have_texts_of_their_own() -> None:
    kinds = [
        Kind("a", "b/c"),
        Kind("a/b", "c"),
        Kind("a", "b", "c"),
        Kind("", "a", "b"),
        Kind("a%2Fb", "c"),
    ]
    assert len({kind.text for kind in kinds}) == len(kinds)


# Claims: an estimate of somebody whose word is not taken as given.

MANY = [10_000] * 30 + [90_000] * 10


@pytest.mark.parametrize(
    ("samples", "default", "said", "expected"),
    [
        # Nothing is known: a probe, of no less than what is claimed, alone.
        ((), None, 0, (Basis.PROBE, 0, 1)),
        ((), None, 70_000, (Basis.PROBE, 70_000, 1)),
        # The default of the target is the least.
        ((), 50_000, 0, (Basis.CONFIGURED, 50_000, 0)),
        ((), 50_000, 70_000, (Basis.CLAIMED, 70_000, 0)),
        # Few costs: down to their median, and no more at once than without the claim.
        ((10_000, 10_000, 90_000), None, 0, (Basis.LEARNED, 10_000, 6)),
        ((10_000, 10_000, 90_000), None, 70_000, (Basis.LEARNED, 70_000, 6)),
        ((10_000, 10_000, 90_000), None, 200_000, (Basis.CLAIMED, 200_000, 6)),
        ((10_000, 10_000, 90_000), 50_000, 0, (Basis.LEARNED, 50_000, 0)),
        # Many: down to their median, beside any default.
        (MANY, None, 0, (Basis.LEARNED, 10_000, 0)),
        (MANY, 50_000, 0, (Basis.LEARNED, 10_000, 0)),
        (MANY, None, 60_000, (Basis.LEARNED, 60_000, 0)),
        (MANY, None, 500_000, (Basis.CLAIMED, 500_000, 0)),
    ],
)
def test_a_claim_raises_what_is_held_and_lowers_it_to_the_median(
    samples: Sequence[int], default: int | None, said: int, expected: tuple[Basis, int, int]
) -> None:
    hold = learned_from(*samples).hold(
        KIND, micro_usd=claimed(said), tokens=NOTHING, default_micro_usd=configured(default)
    )
    found = hold.micro_usd
    basis, amount, at_once = expected
    assert (found.basis, found.at_once, found.claimed) == (basis, at_once, said)
    assert amount <= found.amount <= 1.06 * amount
    is_fixed = basis in (Basis.CLAIMED, Basis.CONFIGURED) and not at_once
    assert (hold.flexible is None) == is_fixed


def test_a_claim_for_an_action_that_nobody_has_seen_lowers_nothing() -> None:
    estimates = learned_from(*MANY, kind=KIND)
    new = Kind("alpha", "agent", "new")
    without = estimates.hold(new, micro_usd=None, tokens=NOTHING).micro_usd
    found = estimates.hold(new, micro_usd=claimed(0), tokens=NOTHING).micro_usd
    assert (found.amount, found.at_once) == (without.amount, 1)
    assert found.amount >= 90_000


def test_a_claim_for_work_that_never_reports_is_held_as_it_is() -> None:
    estimates = Estimates()
    for _ in range(SILENT_AFTER):
        estimates.feed(KIND, Sample(is_done=True, probed=(Unit.MICRO_USD,)))
    found = estimates.hold(KIND, micro_usd=claimed(5), tokens=NOTHING).micro_usd
    assert (found.basis, found.amount) == (Basis.CLAIMED, 5)


@pytest.mark.parametrize(
    ("claimed", "held", "expected"),
    [
        (None, 10, None),
        (0, 10, 0),
        (5, 10, 5),
        (11, 10, 10),
        (2**52, 10, 10),
        (2**52, 0, 2**52),
    ],
)
def test_a_claim_teaches_no_more_than_was_held(
    claimed: int | None, held: int, expected: int | None
) -> None:
    assert believed(claimed, held=held) == expected


def test_an_estimate_from_many_costs_is_late_by_a_few_at_most() -> None:
    kind = Kind("p", "m")
    estimates = Estimates()

    def held() -> Estimate:
        return estimates.hold(kind, micro_usd=NOTHING, tokens=None).tokens

    for number in range(MANY_SAMPLES):
        estimates.feed(kind, Sample(tokens=100 + number % 50, is_done=True))
        assert held().samples == number + 1
    for number in range(3 * LATE_SAMPLES):
        estimates.feed(kind, Sample(tokens=120, is_done=True))
        assert MANY_SAMPLES + number + 1 - held().samples < LATE_SAMPLES
    before = held()
    estimates.feed(kind, Sample(tokens=5_000, is_done=True))
    assert (before.most, held().most) == (149, 5_000), "one that is above all others counts at once"


@pytest.mark.parametrize(
    ("samples", "held", "words"),
    [
        (1, 4_000, "4 times the highest cost of 1 of its kind"),
        (3, 2_000, "twice the highest cost of 3 of its kind"),
        (19, 1_158, "1.16 times the highest cost of 19 of its kind"),
        (3, 1_000, "the highest cost of 3 of its kind"),
    ],
)
def test_a_reservation_says_how_many_times_the_highest_cost_it_is(
    samples: int, held: int, words: str
) -> None:
    found = Estimate(basis=Basis.LEARNED, amount=held, most=1_000, samples=samples)
    assert found.sentence(held, Unit.TOKENS) == f"reserved {held:,} tokens, {words}"
    assert found.prospect(Unit.TOKENS) == f"would reserve {held:,} tokens, {words}"
