"""What is kept of reloads: the last that had something to say."""

from __future__ import annotations

import pytest

from headgate.config.overrides import Change, Difference
from headgate.config.reload import ReloadNotes
from headgate.errors import InvalidSettingError
from headgate.storage.audit import FILE, Actor

PERSON = Actor(name="ada")
CHANGED = (Change(key="scheduler.max_inflight", before=100, after=90),)


async def _changing(_: Actor) -> Difference:
    return Difference(changed=CHANGED)


async def _same(_: Actor) -> Difference:
    return Difference()


async def _wrong(_: Actor) -> Difference:
    raise InvalidSettingError("scheduler.max_inflight", "is not a number")


async def test_a_file_that_was_read_for_a_person_is_no_news_when_it_is_noticed() -> None:
    notes = ReloadNotes(lambda: 5.0)
    await notes.note(PERSON, _changing)
    await notes.note(FILE, _same)
    assert notes.last is not None
    assert (notes.last.by, notes.last.changed) == ("ada", CHANGED)


async def test_whoever_asks_for_a_reload_is_told_of_theirs() -> None:
    notes = ReloadNotes(lambda: 5.0)
    await notes.note(FILE, _changing)
    await notes.note(PERSON, _same)
    assert notes.last is not None
    assert (notes.last.by, notes.last.changed) == ("ada", ())


async def test_a_file_that_is_right_again_ends_what_was_said_of_the_wrong_one() -> None:
    notes = ReloadNotes(lambda: 5.0)
    with pytest.raises(InvalidSettingError):
        await notes.note(PERSON, _wrong)
    assert notes.last is not None
    assert "is not a number" in notes.last.problem
    await notes.note(FILE, _same)
    assert notes.last.problem == ""
