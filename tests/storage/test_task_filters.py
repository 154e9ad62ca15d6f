"""Filters of lists: what they find, in every store, and that a page looks at a bounded part."""

from __future__ import annotations

import msgspec
import pytest

from headgate.core.task import Submission, TaskStatus
from headgate.storage import queries
from headgate.storage.store import TaskQuery
from headgate.storage.task_ids import TaskIds, first_id_at, seconds_of
from storage.scene import FAILED, Place, Scene, ids

RAW = msgspec.Raw(b'{"note": "in the params only", "run": "7"}')
LABELLED = Submission(action="Review Code", params=RAW, labels={"run": "7", 'a"b': "Grüße 100%_"})
ODD = Submission(action="click", labels={"note": "nul:\\u0000"}, input=msgspec.Raw(b'"a\\u0000b"'))

CASES = {
    "everything": ({}, "t4 t3 t2 t1"),
    "a state": ({"states": (TaskStatus.FAILED,)}, "t3"),
    "an agent": ({"agent_id": "other"}, "t2"),
    "a project": ({"project_id": "else"}, "t4"),
    "a target": ({"target": "browser"}, "t4 t3 t2 t1"),
    "a part of a target is none": ({"target": "brow"}, ""),
    "a provider": ({"provider": "acme"}, "t4"),
    "a slot that was given": ({"slot": "key-1"}, "t3"),
    "a budget": ({"scope": "session:s"}, "t4 t3 t1"),
    "a budget around others": ({"scope": "team:x"}, "t2"),
    "a budget by its whole path": ({"scope": "team:x/run:y"}, "t2"),
    "a part of the name of a budget is none": ({"scope": "team:x/run:"}, ""),
    "a name that is no budget": ({"scope": "browser"}, ""),
    "the budget of everything": ({"scope": ""}, "t4 t3 t2 t1"),
    "a label": ({"label": ("run", "7")}, "t1"),
    "a label with another value": ({"label": ("run", "8")}, ""),
    "a label with any value": ({"label": ("run", None)}, "t1"),
    "a key that needs quoting": ({"label": ('a"b', "Grüße 100%_")}, "t1"),
    "a key of the params is no label": ({"label": ("note", "in the params only")}, ""),
    "text in an id": ({"text": "T2"}, "t2"),
    "text in a project": ({"text": "ELSE"}, "t4"),
    "text in an agent": ({"text": "oThEr"}, "t2"),
    "text in an action": ({"text": "review code"}, "t1"),
    "text in a key of a label": ({"text": 'A"B'}, "t1"),
    "text in a value of a label": ({"text": "grüße"}, "t1"),
    "text in an error": ({"text": "IT BROKE"}, "t3"),
    "text in the params only": ({"text": "in the params"}, ""),
    "signs are no patterns": ({"text": "100%_"}, "t1"),
    "no sign stands for another": ({"text": "1%0"}, ""),
    "a quote ends nothing": ({"text": "' OR 1=1 --"}, ""),
    "several hold at once": (
        {"text": "it", "states": (TaskStatus.FAILED,), "target": "browser"},
        "t3",
    ),
    "and all of them must": ({"text": "review", "agent_id": "other"}, ""),
}


async def stage(scene: Scene) -> None:
    """Submit a few tasks that differ in everything that a filter looks at."""
    await scene.submit("t1", submission=LABELLED)
    await scene.submit("t2", agent_id="other", submission=ODD, scopes=("project:p", "team:x/run:y"))
    await scene.submit("t3")
    await scene.assign("t3", slot="key-1")
    await scene.settle("t3", FAILED)
    await scene.submit("t4", project_id="else", provider="acme")


async def test_every_filter_finds_what_it_names(place: Place) -> None:
    async with place.scene() as scene:
        await stage(scene)
        for name, (fields, found) in CASES.items():
            records = await scene.found(TaskQuery(**fields))  # type: ignore[arg-type]
            assert " ".join(ids(records)) == found, name


async def test_times_are_those_of_the_submit(place: Place) -> None:
    task_ids = TaskIds()
    made = [task_ids.new(seconds) for seconds in (100.0, 200.0, 300.0)]
    async with place.scene() as scene:
        for task_id in made:
            await scene.submit(task_id)
        since = await scene.found(TaskQuery(created_after=200.0))
        until = await scene.found(TaskQuery(created_before=300.0))
        between = await scene.found(
            TaskQuery(created_after=200.0, created_before=300.0, text="tsk")
        )
        none = await scene.store.find(TaskQuery(created_after=301.0))
    assert (ids(since), ids(until)) == ([made[2], made[1]], [made[1], made[0]])
    assert ids(between) == [made[1]]
    assert (none.records, none.next_before) == ((), None)


async def walked(scene: Scene, **fields: object) -> list[list[str]]:
    """Read page by page to the last one."""
    found, before, has_more = [], None, True
    while has_more:
        page = await scene.store.find(TaskQuery(before=before, **fields))  # type: ignore[arg-type]
        found.append(ids(page.records))
        before, has_more = page.next_before, page.next_before is not None
    return found


async def test_a_page_looks_at_a_bounded_number_of_tasks_and_the_next_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_ROWS", 3)
    monkeypatch.setattr(queries, "MAX_READ_ROWS", 4)
    async with place.scene() as scene:
        for number in range(9):
            await scene.submit(f"t{number}", agent_id="rare" if number in (0, 7) else "a")
        assert await walked(scene, agent_id="rare") == [["t7"], [], ["t0"]]
        assert await walked(scene, agent_id="nobody") == [[], [], []]
        assert await walked(scene, text="RARE") == [["t7"], [], ["t0"]]
        assert await walked(scene, agent_id="a", limit=2) == [
            ["t8", "t6"],
            ["t5", "t4"],
            ["t3", "t2"],
            ["t1"],
        ]


async def test_among_some_tasks_no_others_are_looked_at(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.scene() as scene:
        for number in range(9):
            await scene.submit(f"t{number}", agent_id="rare" if number in (0, 7) else "a")
        monkeypatch.setattr(queries, "MAX_ROWS", 3)
        monkeypatch.setattr(queries, "MAX_READ_ROWS", 2)
        few = ("t0", "t1", "t7", "gone")
        assert await walked(scene, among=few) == [["t7", "t1", "t0"]]
        assert await walked(scene, among=few, is_oldest_first=True) == [["t0", "t1", "t7"]]
        assert await walked(scene, among=few, limit=2) == [["t7", "t1"], ["t0"]]
        assert await walked(scene, among=few, agent_id="rare") == [["t7", "t0"]]
        assert await walked(scene, among=few, text="rare") == [["t7"], ["t0"]]
        assert await walked(scene, among=()) == [[]]


async def test_the_oldest_come_first_if_that_is_asked_and_pages_go_on_in_that_order(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.scene() as scene:
        for number in range(5):
            await scene.submit(f"t{number}", agent_id="rare" if number in (0, 4) else "a")
        assert await walked(scene, is_oldest_first=True, limit=2) == [
            ["t0", "t1"],
            ["t2", "t3"],
            ["t4"],
        ]
        monkeypatch.setattr(queries, "MAX_ROWS", 2)
        monkeypatch.setattr(queries, "MAX_READ_ROWS", 3)
        rare = {"is_oldest_first": True, "agent_id": "rare"}
        assert await walked(scene, **rare) == [["t0"], [], ["t4"]]
        assert await walked(scene, is_oldest_first=True, text="RARE") == [["t0"], ["t4"]]


async def test_the_oldest_of_a_time_come_first(place: Place) -> None:
    task_ids = TaskIds()
    made = [task_ids.new(seconds) for seconds in (100.0, 200.0, 300.0, 400.0)]
    async with place.scene() as scene:
        for task_id in made:
            await scene.submit(task_id)
        found = await scene.found(
            TaskQuery(created_after=200.0, created_before=400.0, is_oldest_first=True)
        )
        past = await scene.found(
            TaskQuery(created_after=200.0, is_oldest_first=True, before=made[2])
        )
    assert (ids(found), ids(past)) == (made[1:3], made[3:])


async def test_a_page_reads_a_bounded_part_of_what_clients_sent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_SUBMISSION_BYTES", 25_000)
    large = msgspec.Raw(msgspec.json.encode("x" * 10_000))
    huge = msgspec.Raw(msgspec.json.encode("x" * 50_000))
    async with place.scene() as scene:
        for number in range(5):
            work = Submission(action="work", input=huge if number == 2 else large)
            await scene.submit(f"t{number}", submission=work)
        assert await walked(scene, text="nothing") == [[], [], []]
        assert await walked(scene, label=("x", None)) == [[], [], []]
        assert await walked(scene, agent_id="nobody") == [[]]


def test_an_id_tells_when_it_was_made() -> None:
    assert seconds_of(TaskIds().new(1_234.567)) == 1_234.567
    assert seconds_of(first_id_at(99.0)) == 99.0
    for other in ("", "t1", "tsk_1", "tsk_" + "u" * 26, first_id_at(1.0)[4:]):
        assert seconds_of(other) is None
