"""The money of tasks and their calls: booked once, within limits, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.core.budgets.escrow import Amounts
from headgate.core.task_money import GrowingCall, TaskMoney, call_to_refuse


def test_a_cost_goes_to_what_was_drawn_and_then_beside_it() -> None:
    # held, wanted, cost -> drawn, the task's part, the part beside it
    table = [
        (100, 60, 40, 60, 40, 0),
        (100, 100, 100, 100, 100, 0),
        (100, 150, 40, 100, 40, 0),
        (100, 150, 130, 100, 100, 30),
        (100, 150, 180, 100, 100, 80),
        (0, 50, 30, 0, 0, 30),
        (100, 60, 90, 60, 90, 0),
        (100, 60, 130, 60, 100, 30),
        (0, 0, 30, 0, 0, 30),
    ]
    for held, wanted, cost, drawn, of_task, beside in table:
        money = TaskMoney(Amounts(held, held))
        taken = money.draw(Amounts(wanted, wanted))
        assert taken == Amounts(drawn, drawn)
        lacking = Amounts(wanted, wanted).minus(taken)
        parts = money.settle(taken, lacking, Amounts(cost, cost))
        assert parts.of_task == Amounts(of_task, of_task), (held, wanted, cost)
        assert parts.beside == Amounts(beside, beside), (held, wanted, cost)
        assert money.left == Amounts(max(0, held - of_task), max(0, held - of_task))


amounts = st.builds(Amounts, st.integers(0, 200), st.integers(0, 200))


@given(held=amounts, calls=st.lists(st.tuples(amounts, amounts), max_size=8), data=st.data())
def test_the_parts_of_all_calls_are_what_they_cost(
    held: Amounts, calls: list[tuple[Amounts, Amounts]], data: st.DataObject
) -> None:
    money = TaskMoney(held)
    running = [(wanted, cost, money.draw(wanted)) for wanted, cost in calls]
    assert held.covers(money.drawn)
    total = of_tasks = beside = Amounts()
    for wanted, cost, drawn in data.draw(st.permutations(running)):
        lacking = wanted.minus(drawn)
        parts = money.settle(drawn, lacking, cost)
        total, of_tasks = total.plus(cost), of_tasks.plus(parts.of_task)
        beside = beside.plus(parts.beside)
        if wanted.covers(cost):
            assert lacking.covers(parts.beside), "within what was held, nothing is an overrun"
    assert of_tasks.plus(beside) == total
    assert money.used == of_tasks
    assert money.drawn == Amounts()
    assert held.covers(of_tasks)


class _Task:
    """A task of the model: it holds something, and makes its calls one after the other."""

    def __init__(self, name: str, held: int, calls: list[tuple[int, int]]) -> None:
        self.name = name
        self.money = TaskMoney(Amounts(held))
        self.calls = calls
        self.done: list[bool] = []
        self.running: tuple[Amounts, int, int] | None = None
        self.is_growing = False
        self.is_over = False


class _Scope:
    """One limited scope that tasks hold something in, and grow in."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spent = 0
        self.reserved = 0

    def reserve(self, amount: int) -> bool:
        if self.spent + self.reserved + amount > self.limit:
            return False
        self.reserved += amount
        return True

    def commit(self, held: int, cost: int) -> None:
        self.reserved -= held
        self.spent += cost


def _step(scope: _Scope, tasks: list[_Task], task: _Task) -> None:
    """Let a task do the next thing: end its call, begin one, or end."""
    if task.running is not None:
        drawn, beside, cost = task.running
        parts = task.money.settle(drawn, Amounts(beside), Amounts(cost))
        scope.commit(beside, parts.beside.micro_usd)
        task.running = None
        task.done.append(True)
    elif len(task.done) == len(task.calls):
        scope.commit(task.money.held.micro_usd, task.money.used.micro_usd)
        task.is_over = True
    else:
        wanted, cost = task.calls[len(task.done)]
        drawn = task.money.draw(Amounts(wanted))
        lacking = wanted - drawn.micro_usd
        if scope.reserve(lacking):
            task.is_growing = False
            task.running = (drawn, lacking, cost)
            return
        task.money.give_back(drawn)
        task.is_growing = True
        growing = [one for one in tasks if one.is_growing]
        refused = call_to_refuse(
            [GrowingCall(one.name, one.name, float(tasks.index(one))) for one in growing],
            reserved=scope.reserved,
            held_by_stuck={one.name: one.money.held.micro_usd for one in growing},
        )
        for one in growing:
            if one.name == refused:
                one.done.append(False)
                one.is_growing = False


calls = st.lists(
    st.integers(1, 60).flatmap(lambda held: st.tuples(st.just(held), st.integers(0, held))),
    max_size=4,
)


@given(
    limit=st.integers(10, 100),
    shapes=st.lists(st.tuples(st.integers(0, 40), calls), min_size=1, max_size=6),
    data=st.data(),
)
def test_tasks_that_wait_to_grow_in_one_scope_all_come_to_their_end(
    limit: int, shapes: list[tuple[int, list[tuple[int, int]]]], data: st.DataObject
) -> None:
    scope = _Scope(limit)
    tasks = [
        _Task(str(place), held, its)
        for place, (held, its) in enumerate(shapes)
        if scope.reserve(held)
    ]
    # Each call is begun, ended or refused once; between two of these all that wait may ask again.
    most = (2 * sum(len(task.calls) for task in tasks) + len(tasks) + 1) * (len(tasks) + 1)
    for _ in range(most):
        left = [task for task in tasks if not task.is_over]
        if not left:
            break
        moving = [task for task in left if not task.is_growing] or left
        asked = [task for task in left if task.is_growing]
        for task in (data.draw(st.sampled_from(moving)), *asked):
            if not task.is_over:
                _step(scope, tasks, task)
        assert scope.spent + scope.reserved <= scope.limit
    assert all(task.is_over for task in tasks)
    assert scope.reserved == 0


def test_the_youngest_gives_up_only_where_nobody_else_holds_anything() -> None:
    growing = [
        GrowingCall("a", "t1", 1.0),
        GrowingCall("c", "t2", 2.0),
        GrowingCall("b", "t2", 2.0),
    ]
    stuck = {"t1": 40, "t2": 60}
    assert call_to_refuse(growing, reserved=101, held_by_stuck=stuck) is None
    assert call_to_refuse(growing, reserved=100, held_by_stuck=stuck) == "c"
    assert call_to_refuse([], reserved=0, held_by_stuck={}) is None
