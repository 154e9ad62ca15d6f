"""Never more than two questions a second, and none is forgotten however many there are."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

from headgate.cli.top.service_state import (
    PAUSE_SECONDS,
    Question,
    QuestionSchedule,
    Throttle,
    Topic,
)
from headgate.cli.top.watcher import LIVELY_SECONDS, OTHERS_LIVELY_SECONDS
from headgate.testing import SimulatedLoop, simulate

STATS, RUNNING, SLOTS = (Question(one) for one in (Topic.STATS, Topic.RUNNING, Topic.SLOTS))


def asked(wanted: dict[Question, float], *, seconds: float, took: float = 0.0) -> Counter[Question]:
    """Return how often each is asked, with a turn in every half second."""
    rota, counts = QuestionSchedule(), Counter[Question]()
    for turn in range(int(seconds / PAUSE_SECONDS)):
        now = 100.0 + turn * PAUSE_SECONDS
        question = rota.next(wanted, now)
        if question is not None:
            counts[question] += 1
            rota.note(question, now, now + took)
    return counts


def test_each_is_asked_as_often_as_it_should_be() -> None:
    assert asked({STATS: 2.0, SLOTS: 10.0}, seconds=60) == {STATS: 30, SLOTS: 6}


def test_with_too_many_questions_all_come_later_and_none_is_forgotten() -> None:
    whys = {Question(Topic.WHY, f"t{number}"): 10.0 for number in range(50)}
    counts = asked({STATS: 2.0, **whys}, seconds=120)
    assert counts.total() == 240
    assert all(counts[one] >= 3 for one in whys)
    assert counts[STATS] > 5 * max(counts[one] for one in whys) * 0.6


def test_with_all_panes_and_sixteen_rows_figures_are_five_seconds_old_and_reasons_twenty() -> None:
    panes = [one for one in Topic if one is not Topic.WHY]
    wanted = {Question(one): LIVELY_SECONDS.get(one, OTHERS_LIVELY_SECONDS) for one in panes}
    whys = {Question(Topic.WHY, f"t{n}"): LIVELY_SECONDS[Topic.WHY] for n in range(16)}
    counts = asked({**wanted, **whys}, seconds=1_200)
    assert 4 < 1_200 / counts[STATS] < 5
    assert 20 < 1_200 / counts[Question(Topic.WHY, "t0")] < 23


def test_what_is_new_does_not_stand_before_what_is_overdue() -> None:
    rota = QuestionSchedule()
    assert rota.next({STATS: 2.0}, 0.0) == STATS
    rota.note(STATS, 0.0, 0.0)
    new = Question(Topic.WHY, "new")
    assert rota.next({STATS: 2.0, new: 10.0}, 3.0) == STATS


def test_a_pane_without_an_answer_comes_before_what_is_overdue() -> None:
    rota = QuestionSchedule()
    rota.note(STATS, 0.0, 0.0)
    assert rota.next({STATS: 2.0, RUNNING: 10.0}, 60.0) == RUNNING


def test_a_reason_that_was_never_asked_for_becomes_more_urgent_while_it_waits() -> None:
    rota, new = QuestionSchedule(), Question(Topic.WHY, "new")
    wanted = {STATS: 2.0, new: 2.0}
    asked = []
    for turn in range(4):
        rota.note(STATS, turn - 2.9, turn - 2.9)
        asked.append(rota.next(wanted, float(turn)))
    assert asked == [STATS, new, new, new]


def test_answers_that_take_long_are_asked_for_less_often() -> None:
    assert asked({RUNNING: 2.0}, seconds=62, took=1.0)[RUNNING] == 7


def test_an_answer_that_is_late_for_once_does_not_hold_up_the_next() -> None:
    rota = QuestionSchedule()
    rota.note(STATS, 0.0, 0.1)
    rota.note(STATS, 2.0, 11.0)
    assert rota.next({STATS: 2.0}, 11.5) == STATS


def test_what_is_no_longer_wanted_is_remembered_for_a_minute() -> None:
    rota = QuestionSchedule()
    for number in range(1000):
        question = Question(Topic.WHY, f"t{number}")
        assert rota.next({question: 10.0}, float(number)) == question
        rota.note(question, float(number), float(number))
    rota.next({STATS: 2.0}, 1000.0)
    assert rota.asked_at(Question(Topic.WHY, "t939")) is None
    assert rota.asked_at(Question(Topic.WHY, "t941")) == 941.0


def test_what_was_changed_is_asked_again_at_once() -> None:
    rota = QuestionSchedule()
    rota.note(RUNNING, 0.0, 0.0)
    assert rota.next({RUNNING: 10.0}, 1.0) is None
    rota.forget(Topic.RUNNING)
    assert rota.next({RUNNING: 10.0}, 1.0) == RUNNING


def test_what_was_changed_comes_before_what_is_overdue_however_long_it_took() -> None:
    rota = QuestionSchedule()
    rota.note(RUNNING, 0.0, 8.0)
    rota.note(STATS, 0.0, 0.0)
    rota.forget(Topic.RUNNING)
    for now in (60.0, 61.0):
        assert rota.next({STATS: 2.0, RUNNING: 10.0}, now) == RUNNING


def test_turns_of_everybody_are_at_least_a_pause_apart() -> None:
    async def main(loop: SimulatedLoop) -> None:
        throttle = Throttle(PAUSE_SECONDS, clock=loop.time)
        began, taken = loop.time(), list[float]()

        async def somebody() -> None:
            for _ in range(20):
                await throttle.turn()
                taken.append(loop.time() - began)

        await asyncio.gather(somebody(), somebody(), somebody())
        taken.sort()
        assert all(later - sooner >= PAUSE_SECONDS - 1e-6 for sooner, later in pairwise(taken))

    simulate(main)


def test_what_a_person_asks_for_comes_at_once_and_others_wait_for_it() -> None:
    async def main(loop: SimulatedLoop) -> None:
        throttle = Throttle(PAUSE_SECONDS, clock=loop.time)
        await throttle.turn()
        throttle.take()
        began = loop.time()
        await throttle.turn()
        assert abs(loop.time() - began - 2 * PAUSE_SECONDS) < 1e-6

    simulate(main)
