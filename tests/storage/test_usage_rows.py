"""Usage rows: one sum for each hour, project, agent and model, and reports of them."""

from __future__ import annotations

import random
from functools import partial

import msgspec
import pytest

from headgate.cli.doctor_checks import Finding, price_findings, silence_findings
from headgate.core.budgets.ledger import Unit
from headgate.core.dispatch_state import TargetEstimate
from headgate.core.estimates import SILENT_AFTER, Kind, Sample, SilentKind
from headgate.core.lifecycle import NOTHING_USED, UNKNOWN_USAGE, Succeeded, Usage, cost_of
from headgate.core.money import (
    MAX_BALANCE,
    MAX_RESERVATION_MICRO_USD,
    MAX_RESERVATION_TOKENS,
)
from headgate.core.retention import USAGE_KEPT_SECONDS
from headgate.providers.prices import PriceList
from headgate.storage import usage
from headgate.storage.migrations import migrate
from headgate.storage.schema import ESTIMATE_ROWS
from headgate.storage.tokens import UNBOUND, Bounds
from headgate.storage.transaction import Dialect, Transaction
from headgate.storage.unit_of_work import TICK, Counters, learned_rows
from headgate.storage.usage import (
    GROUPINGS,
    MAX_PER_HOUR,
    MAX_ROWS,
    MAX_TOTALS,
    OTHER,
    OWN_TOTALS,
    Grouping,
    UnpricedModel,
    UsageReport,
    UsageReports,
    UsageSum,
)
from storage.scene import AGAIN, DONE, Place, Scene

HOUR = 3_600.0
DAY = 86_400.0


def used(transaction: Transaction, now: float, *, keys: list[tuple[str, str, str]]) -> None:
    """Write one attempt for each key, the first the cheapest."""
    counters = Counters(now)
    for place, key in enumerate(keys):
        counters.use(
            key,
            is_over=True,
            tokens=10,
            micro_usd=place,
            assumed_tokens=4,
            assumed_micro_usd=place // 2,
        )
        counters.spend(key[0], tokens=10, micro_usd=place)
        counters.count(TICK)
    transaction.insert_all(counters.rows())


async def report(scene: Scene, by: Grouping, bounds: Bounds = UNBOUND) -> UsageReport:
    now = scene.clock()
    return await UsageReports(scene.store).report(by, since=0.0, until=now + 1.0, bounds=bounds)


async def figures(scene: Scene, by: Grouping) -> dict[str, tuple[int, int, int, int]]:
    rows = (await report(scene, by)).rows
    return {one.key: (one.tasks, one.attempts, one.tokens, one.micro_usd) for one in rows}


async def test_a_settled_task_counts_for_its_project_agent_model_and_day(place: Place) -> None:
    async with place.scene() as scene:
        for task_id, model in (("t1", "large"), ("t2", "large"), ("t3", None)):
            await scene.run(task_id)
            await scene.settle(task_id, cost=Usage(tokens=70, micro_usd=7, model=model))
        assert await figures(scene, "project") == {"search": (3, 3, 210, 21)}
        assert await figures(scene, "agent") == {"coder": (3, 3, 210, 21)}
        assert await figures(scene, "model") == {"large": (2, 2, 140, 14), "": (1, 1, 70, 7)}
        (day,) = await figures(scene, "day")
        assert len(day) == len("2027-01-15")
        total = UsageSum(key="", tasks=3, attempts=3, tokens=210, micro_usd=21)
        assert (await report(scene, "day")).total == total


async def test_an_attempt_that_is_tried_again_is_no_task_that_ended(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.settle("t1", AGAIN, cost=Usage(tokens=5, micro_usd=1))
        assert await figures(scene, "agent") == {"coder": (0, 1, 5, 1)}
        await scene.assign("t1", attempt=2)
        await scene.settle("t1", DONE, attempt=2, cost=Usage(tokens=5, micro_usd=1))
        assert await figures(scene, "agent") == {"coder": (1, 2, 10, 2)}


async def test_a_settlement_that_comes_twice_counts_once(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        for _ in range(2):
            await scene.settle("t1", cost=Usage(tokens=5, micro_usd=1, model="m"))
        assert await figures(scene, "model") == {"m": (1, 1, 5, 1)}


async def test_whoever_is_bound_sees_its_own(place: Place) -> None:
    async with place.scene() as scene:
        keys = [("p", "a", "m"), ("p", "b", "m"), ("q", "a", "m")]
        await scene.store.run(partial(used, keys=keys))
        for bounds, attempts in (
            (Bounds(project_id="p"), 2),
            (Bounds(agent_id="a"), 2),
            (Bounds(agent_id="a", project_id="p"), 1),
            (Bounds(agent_id="nobody"), 0),
        ):
            found = await report(scene, "model", bounds)
            assert found.total.attempts == attempts
            assert sum(one.attempts for one in found.rows) == attempts


async def test_a_report_covers_the_hours_that_it_names(place: Place) -> None:
    async with place.scene() as scene:
        usage = UsageReports(scene.store)
        start = scene.clock()
        for hours in range(3):
            await scene.store.run(partial(used, keys=[("p", "a", f"m{hours}")]))
            scene.clock.advance(HOUR)
        second = start + HOUR
        found = await usage.report("model", since=second, until=second + 1.0, bounds=UNBOUND)
        assert [one.key for one in found.rows] == ["m1"]
        assert (found.since % HOUR, found.until - found.since) == (0.0, HOUR)


async def test_days_come_in_their_order_and_all_else_by_cost(place: Place) -> None:
    async with place.scene() as scene:
        keys = [("p", "cheap", "m"), ("p", "dear", "m")]
        await scene.store.run(partial(used, keys=keys))
        scene.clock.advance(DAY)
        await scene.store.run(partial(used, keys=keys[:1]))
        assert [one.key for one in (await report(scene, "agent")).rows] == ["dear", "cheap"]
        days = [one.key for one in (await report(scene, "day")).rows]
        assert days == sorted(days)
        assert len(days) == 2


async def test_usage_is_kept_for_thirty_days(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        await scene.store.run(partial(used, keys=[("p", "a", "m")]))
        scene.clock.advance(USAGE_KEPT_SECONDS - 2 * HOUR)
        await scene.store.run(usage.purge)
        assert await figures(scene, "agent") == {"a": (1, 1, 10, 0)}
        scene.clock.advance(3 * HOUR)
        await scene.store.run(usage.purge)
        assert await figures(scene, "agent") == {}


async def test_an_hour_with_too_many_rows_has_its_cheapest_added_up(place: Place) -> None:
    async with place.scene() as scene:
        many = [("p", f"a{n:05}", "m") for n in range(MAX_PER_HOUR + 100)]
        await scene.store.run(partial(used, keys=[*many, ("q", "b", "m")]))
        before = (await report(scene, "agent")).total
        for _ in range(2):
            await scene.store.run(usage.purge)
            assert (await report(scene, "agent")).total == before
        agents = await figures(scene, "agent")
        assert len(agents) == MAX_PER_HOUR // 2 + 1
        assert agents[OTHER][1] == len(many) + 1 - MAX_PER_HOUR // 2
        assert agents["b"] == (1, 1, 10, len(many))
        assert f"a{MAX_PER_HOUR + 99:05}" in agents
        assert "a00000" not in agents


async def test_an_agent_named_other_does_not_read_what_was_added_up(place: Place) -> None:
    async with place.scene() as scene:
        many = [("p", f"a{n:05}", "m") for n in range(MAX_PER_HOUR + 100)]
        await scene.store.run(partial(used, keys=[*many, ("p", "other", "other")]))
        before = await report(scene, "agent", bounds=Bounds(agent_id="other"))
        await scene.store.run(usage.purge)
        after = await report(scene, "agent", bounds=Bounds(agent_id="other"))
        assert (before.total.attempts, after.total.attempts) == (1, 1)


async def test_a_report_has_so_many_rows_and_one_for_the_rest(place: Place) -> None:
    async with place.scene() as scene:
        many = [("p", f"a{n:05}", "m") for n in range(MAX_ROWS + 5)]
        await scene.store.run(partial(used, keys=many))
        found = await report(scene, "agent")
        assert len(found.rows) == MAX_ROWS + 1
        rest = found.rows[-1]
        assert (rest.key, rest.attempts, rest.micro_usd) == (OTHER, 5, sum(range(5)))


@pytest.mark.parametrize(
    ("cost", "booked", "assumed"),
    [
        (Usage(tokens=70, micro_usd=7), (70, 7), (0, 0)),
        (Usage(tokens=70, micro_usd=None), (70, 10), (0, 10)),
        (Usage(tokens=None, micro_usd=7), (100, 7), (100, 0)),
        (UNKNOWN_USAGE, (100, 10), (100, 10)),
        (NOTHING_USED, (0, 0), (0, 0)),
    ],
)
async def test_what_nobody_reported_is_in_the_report_as_assumed(
    place: Place, cost: Usage, booked: tuple[int, int], assumed: tuple[int, int]
) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.settle("t1", cost=cost)
        await scene.run("t2")
        await scene.settle("t2", cost=Usage(tokens=1, micro_usd=1))
        for by in GROUPINGS:
            total = (await report(scene, by)).total
            assert (total.tokens - 1, total.micro_usd - 1) == booked
            assert (total.assumed_tokens, total.assumed_micro_usd) == assumed


@pytest.mark.parametrize("model", ["x" * 129, "a\nb", "", 5])
async def test_a_name_that_cannot_be_shown_is_no_model(model: object) -> None:
    outcome = Succeeded(usage=Usage(tokens=1, micro_usd=1, model=model))  # type: ignore[arg-type]
    assert cost_of(outcome, reserved_tokens=0, reserved_micro_usd=0).model is None


async def in_all(scene: Scene) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the sums over all time."""
    rows = await UsageReports(scene.store).totals()
    return {(row.project_id, row.model): msgspec.structs.astuple(row)[2:] for row in rows}


async def test_sums_tell_dollars_apart_by_how_they_are_known(place: Place) -> None:
    async with place.scene() as scene:
        for task_id, cost in (
            ("t1", Usage(tokens=70, micro_usd=7, model="m", is_priced=True)),
            ("t2", Usage(tokens=70, micro_usd=5, model="m")),
            ("t3", Usage(tokens=70, model="m", is_priced=True)),
            ("t4", Usage(micro_usd=3, model="m", is_priced=True)),
        ):
            await scene.run(task_id)
            await scene.settle(task_id, cost=cost)
        # What was held, 100 tokens and 10 micro-dollars, is assumed.
        assert await in_all(scene) == {("search", "m"): (310, 25, 100, 10, 70, 10, 0)}


@pytest.mark.parametrize(
    ("tokens", "micro_usd", "overruns"),
    [(100, 10, 0), (101, 10, 1), (100, 11, 1), (500, 50, 1), (0, 0, 0)],
)
async def test_an_attempt_that_cost_more_than_was_held_is_an_overrun(
    place: Place, tokens: int, micro_usd: int, overruns: int
) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.settle("t1", cost=Usage(tokens=tokens, micro_usd=micro_usd))
        await scene.submit("t2")
        await scene.assign("t2", tokens=0, micro_usd=0)
        await scene.settle("t2", cost=Usage(tokens=9, micro_usd=9))
        (sums,) = (await in_all(scene)).values()
        assert sums[-1] == overruns


def price_lines(transaction: Transaction, now: float) -> list[Finding]:
    return list(price_findings(transaction, now, PriceList()))


async def test_models_without_a_price_are_told_for_a_day(place: Place) -> None:
    async with place.scene() as scene:
        reports = UsageReports(scene.store)
        for task_id, cost in (
            ("t1", Usage(tokens=900_000, model="house-model")),
            ("t2", Usage(tokens=5, model="small")),
            ("t3", Usage(tokens=5, model="known", micro_usd=1)),
            ("t4", Usage(tokens=5, model="free", micro_usd=0)),
            ("t5", Usage(tokens=5)),
            ("t6", Usage(model="silent")),
        ):
            await scene.run(task_id)
            await scene.settle(task_id, cost=cost)
        assert await reports.unpriced() == (
            UnpricedModel(model="house-model", tokens=900_000, assumed_micro_usd=10),
            UnpricedModel(model="small", tokens=5, assumed_micro_usd=10),
        )
        first, second = await scene.store.run(price_lines)
        assert (first.verdict, second.verdict) == ("warn", "warn")
        assert "900,000 tokens" in first.found
        assert first.advice.startswith('add [prices."house-model"] with input = …')
        scene.clock.advance(DAY + HOUR)
        assert await reports.unpriced() == ()
        (finding,) = await scene.store.run(price_lines)
        assert finding.verdict == "ok"


REVIEW, OTHERS = Kind("alpha", "review", "read"), Kind("beta", "agent")
NO_DOLLARS = Sample(tokens=7, is_done=True, probed=(Unit.MICRO_USD,))
NO_WORD = Sample(is_done=True, probed=tuple(Unit))
COSTS = Sample(micro_usd=100, tokens=7, is_done=True)


def feed(transaction: Transaction, now: float, *, samples: list[tuple[Kind, Sample]]) -> None:
    for sample in samples:
        transaction.insert_all([(ESTIMATE_ROWS, learned_rows(transaction, [sample], now))])


def silence_lines(transaction: Transaction, now: float) -> list[Finding]:
    return list(silence_findings(transaction, now, {}))


async def test_work_that_reports_nothing_is_told_for_a_day_with_the_line_to_add(
    place: Place,
) -> None:
    async with place.scene() as scene:
        reports = UsageReports(scene.store)
        (finding,) = await scene.store.run(silence_lines)
        assert finding.verdict == "ok"
        few = [(REVIEW, NO_DOLLARS)] * (SILENT_AFTER - 1)
        await scene.store.run(partial(feed, samples=[*few, (OTHERS, COSTS), (OTHERS, NO_WORD)]))
        assert await reports.silent({}) == ()
        assert [one.verdict for one in await scene.store.run(silence_lines)] == ["warn"]
        await scene.store.run(partial(feed, samples=[(REVIEW, NO_DOLLARS)]))
        coarse = Kind("alpha", "review")
        assert await reports.silent({}) == (SilentKind(coarse, Unit.MICRO_USD),)
        (finding,) = await scene.store.run(silence_lines)
        assert finding.verdict == "warn"
        assert finding.found.startswith("'review' reports no dollars in project alpha")
        assert finding.advice == (
            'add estimate_usd = … to [targets."review"], or let its responses report `usage`'
            " with a `model` that has a price"
        )
        assert await reports.silent({"review": TargetEstimate(micro_usd=5)}) == ()
        assert len(await reports.silent({"review": TargetEstimate(tokens=5)})) == 1
        scene.clock.advance(DAY + HOUR)
        assert await reports.silent({}) == ()


async def test_what_is_known_of_kinds_is_read_the_last_fed_first(place: Place) -> None:
    async with place.scene() as scene:
        reports = UsageReports(scene.store)
        await scene.store.run(partial(feed, samples=[(REVIEW, COSTS)]))
        scene.clock.advance(HOUR)
        await scene.store.run(partial(feed, samples=[(OTHERS, COSTS)]))
        known = await reports.kinds()
        assert [one.kind for one in known] == [OTHERS, Kind("alpha", "review"), REVIEW]
        assert known[0].fed_at - known[1].fed_at == HOUR
        assert (known[0].learned.micro_usd.count, known[0].learned.tokens.largest) == (1, 7)
        assert [one.kind for one in await reports.kinds("alpha", most=1)] == [known[1].kind]


@pytest.mark.parametrize("seed", range(3))
async def test_sums_over_all_time_never_go_down(place: Place, seed: int) -> None:
    draw = random.Random(seed)
    async with place.scene(evicts=True) as scene:
        before: dict[tuple[str, str], tuple[int, ...]] = {}
        spent = 0
        for _ in range(6):
            keys = [
                (f"p{draw.randrange(3)}", f"a{draw.randrange(9)}", f"m{draw.randrange(2_000)}")
                for _ in range(400)
            ]
            await scene.store.run(partial(used, keys=keys))
            spent += sum(range(len(keys)))
            await scene.store.run(usage.purge)
            scene.clock.advance(draw.choice((1.0, HOUR, 40 * DAY)))
            await scene.store.run(usage.purge)
            now = await in_all(scene)
            assert sum(sums[1] for sums in now.values()) == spent
            for key, sums in before.items():
                assert all(new >= old for new, old in zip(now[key], sums, strict=True)), key
            assert len(now) <= OWN_TOTALS + 3
            before = now
        (kept,) = await scene.store.ask(lambda t: t.read("SELECT COUNT(*) FROM usage_totals"))
        assert kept[0] <= MAX_TOTALS


async def test_sums_over_all_time_are_those_of_the_rows_from_before(place: Place) -> None:
    def to_third_version(transaction: Transaction, _: float) -> None:
        for table in ("usage_totals", "forgotten_lanes"):
            transaction.run(f"DROP TABLE {table}")
        transaction.run("ALTER TABLE usage_rows DROP COLUMN unpriced_tokens")
        if transaction.dialect is Dialect.POSTGRES:
            # SQLite makes the table anew in any case.
            for column in ("slot", "calls"):
                transaction.run(f"ALTER TABLE usage_rows DROP COLUMN {column}")
            key = "(hour, project_id, agent_id, model)"
            transaction.run(f"ALTER TABLE usage_rows ADD PRIMARY KEY {key}")
        transaction.run("UPDATE headgate_schema SET version = 3 WHERE part = 'usage'")

    def migrated(transaction: Transaction, _: float) -> int:
        return migrate(transaction, usage.PART, usage.MIGRATIONS)

    async with place.scene() as scene:
        keys = [("p", "a", "m"), ("p", "b", "m"), ("p", "a", ""), ("q", "a", OTHER)]
        await scene.store.run(partial(used, keys=keys))
        before = await in_all(scene)
        await scene.store.run(to_third_version)
        assert await scene.store.run(migrated) == 3
        assert await in_all(scene) == before
        await scene.store.run(partial(used, keys=keys))
        assert await in_all(scene) == {
            key: tuple(2 * amount for amount in sums) for key, sums in before.items()
        }


def filled(transaction: Transaction, now: float, *, amount: int) -> None:
    counters = Counters(now)
    counters.use(
        ("search", "coder", ""),
        is_over=True,
        tokens=amount,
        micro_usd=amount,
        assumed_tokens=0,
        assumed_micro_usd=0,
    )
    counters.count(TICK)
    counters.spend("search", tokens=amount, micro_usd=amount)
    counters.forgive("search", 2**70)
    transaction.insert_all(counters.rows())


async def test_sums_stop_growing_where_a_ledger_does_and_tasks_still_end(place: Place) -> None:
    largest = Usage(tokens=MAX_RESERVATION_TOKENS, micro_usd=MAX_RESERVATION_MICRO_USD)
    async with place.scene() as scene:
        below = MAX_BALANCE - 1
        await scene.store.writer.submit(partial(filled, now=scene.clock(), amount=below))
        for task_id in ("t1", "t2", "t3"):
            await scene.run(task_id)
            (record,) = await scene.settle(task_id, cost=largest)
            assert record.is_terminal
        most = below + MAX_RESERVATION_TOKENS
        assert await figures(scene, "project") == {"search": (4, 4, most, most)}
