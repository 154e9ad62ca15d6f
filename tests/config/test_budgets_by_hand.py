"""Budgets that were set by hand: each counts as a whole, and none is lost without a word."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from config.running import FAST, WORK, running
from headgate.cli.doctor_checks import replacement_findings
from headgate.cli.up import welcome
from headgate.storage.sqlite import SqliteReader

BASE = FAST + WORK
HUNDRED = BASE + '[budgets.root]\nlimit_usd = "100"\n'
FIVE_A_DAY = {"limitUsd": "5", "window": "day"}
REPLACED = "budget root: the $5.00 a day set by hand was replaced by the file: $100.00"

Shown = tuple[str | None, int | None, str]


class Restarts:
    """Starts a service on one store, each time with another file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = f"sqlite:///{folder / 'store.db'}"

    async def set_by_hand(self, text: str, **values: object) -> None:
        """Start with a file, change the budget of the root by hand, and stop."""
        async with running(self._folder, text, store=self._store) as service:
            response = await service.ask("PATCH", "/budgets?scope=", values)
            assert response.status == 200, response.body

    async def shown(self, text: str) -> list[Shown]:
        """Start with a file, and return the budgets that are in force."""
        async with running(self._folder, text, store=self._store) as service:
            found = (await service.get("/budgets"))["budgets"]
            return [(one["limitUsd"], one["limitTokens"], one["window"]) for one in found]

    async def reserves(self, text: str) -> list[str | None]:
        """Start with a file, and return what calls reserve in each budget."""
        async with running(self._folder, text, store=self._store) as service:
            return [one["reserve"] for one in (await service.get("/budgets"))["budgets"]]

    async def printed(self, text: str) -> str:
        """Start with a file, and return what `headgate up` prints."""
        async with running(self._folder, text, store=self._store) as service:
            return await welcome(
                service.service, "http://127.0.0.1:1", self._folder, [], {}, as_json=False
            )

    async def audited(self, text: str) -> list[Any]:
        """Start with a file, and return what the audit log says of replaced budgets."""
        async with running(self._folder, text, store=self._store) as service:
            entries = (await service.get("/audit"))["entries"]
            return [one for one in entries if one["action"] == "budget.replace"]

    def diagnosed(self) -> list[tuple[str, str]]:
        """Return what a doctor says of replaced budgets."""
        reader = SqliteReader(self._folder / "store.db")
        try:
            found = list(replacement_findings(reader.begin(), time.time()))
        finally:
            reader.rollback()
            reader.close()
        return [(one.verdict, one.found) for one in found]


@pytest.fixture
def restarts(tmp_path: Path) -> Restarts:
    return Restarts(tmp_path)


async def test_a_file_that_says_another_limit_replaces_the_window_as_well(
    restarts: Restarts,
) -> None:
    await restarts.set_by_hand(BASE, **FIVE_A_DAY)
    assert await restarts.shown(BASE) == [("5.00", None, "day")]
    assert await restarts.shown(HUNDRED) == [("100.00", None, "none")]


async def test_a_file_that_adds_a_window_replaces_a_limit_that_was_set_by_hand(
    restarts: Restarts,
) -> None:
    await restarts.set_by_hand(HUNDRED, limitUsd="5")
    assert await restarts.shown(HUNDRED) == [("5.00", None, "none")]
    assert await restarts.shown(HUNDRED + 'window = "week"\n') == [("100.00", None, "week")]


async def test_a_budget_set_by_hand_keeps_its_window_when_it_leaves_the_file(
    restarts: Restarts,
) -> None:
    await restarts.set_by_hand(HUNDRED + 'window = "week"\n', limitUsd="5")
    assert await restarts.shown(BASE) == [("5.00", None, "week")]
    other = BASE + "[budgets.'session:s']\nlimit_tokens = 3\n"
    assert await restarts.shown(other) == [(None, 3, "none"), ("5.00", None, "week")]


async def test_a_file_that_says_the_same_as_the_hand_ends_nothing(restarts: Restarts) -> None:
    await restarts.set_by_hand(BASE, **FIVE_A_DAY)
    same = BASE + '[budgets.root]\nlimit_usd = "5"\nwindow = "day"\n'
    assert await restarts.shown(same) == [("5.00", None, "day")]
    assert await restarts.shown(BASE) == [("5.00", None, "day")]


async def test_a_reset_of_all_that_differs_goes_back_to_the_file(restarts: Restarts) -> None:
    await restarts.set_by_hand(HUNDRED, **FIVE_A_DAY)
    await restarts.set_by_hand(HUNDRED, reset=["window"])
    assert await restarts.shown(HUNDRED) == [("5.00", None, "none")]
    await restarts.set_by_hand(HUNDRED, reset=["limitUsd"])
    assert await restarts.shown(HUNDRED) == [("100.00", None, "none")]
    assert await restarts.shown(BASE) == []


async def test_a_reserve_set_by_hand_holds_until_the_file_says_another(restarts: Restarts) -> None:
    await restarts.set_by_hand(HUNDRED, reserve="strict")
    await restarts.set_by_hand(HUNDRED, limitUsd="5")
    assert await restarts.reserves(HUNDRED) == ["strict"]
    expected = HUNDRED + 'reserve = "expected"\n'
    assert await restarts.reserves(expected) == ["expected"]
    assert await restarts.shown(expected) == [("100.00", None, "none")]
    await restarts.set_by_hand(expected, reserve=None)
    await restarts.set_by_hand(expected, limitUsd="5")
    assert await restarts.reserves(expected) == [None]
    await restarts.set_by_hand(expected, reset=["reserve"])
    assert await restarts.reserves(expected) == ["expected"]


async def test_a_start_says_which_budget_the_file_has_replaced(restarts: Restarts) -> None:
    await restarts.set_by_hand(BASE, **FIVE_A_DAY)
    assert restarts.diagnosed() == [("ok", "the file has replaced no budget that was set by hand")]
    assert f"  warning: {REPLACED}" in (await restarts.printed(HUNDRED)).splitlines()
    assert restarts.diagnosed() == [("warn", REPLACED)]
    assert "replaced" not in await restarts.printed(HUNDRED)
    (entry,) = await restarts.audited(HUNDRED)
    assert (entry["actor"], entry["subject"]) == ("(file)", "root")
    assert entry["detail"] == {"budgets.root": {"from": "$5.00 a day set by hand", "to": "$100.00"}}


async def test_a_budget_that_somebody_sets_again_is_no_news_for_a_doctor(
    restarts: Restarts,
) -> None:
    await restarts.set_by_hand(BASE, **FIVE_A_DAY)
    await restarts.shown(HUNDRED)
    await restarts.set_by_hand(HUNDRED, limitUsd="7")
    assert [verdict for verdict, _ in restarts.diagnosed()] == ["ok"]


async def test_another_key_of_the_file_that_limits_the_same_replaces_it_with_a_word(
    restarts: Restarts,
) -> None:
    await restarts.set_by_hand(BASE, limitUsd="5", window="week@Europe/Berlin")
    tokens = FAST + "global_budget = 1000\nusage_window_hours = 1\n" + WORK
    line = (
        "budget root: the $5.00 a week (Europe/Berlin) set by hand"
        " was replaced by the file: 1,000 tokens over any hour"
    )
    assert line in await restarts.printed(tokens)
    assert await restarts.shown(BASE) == []


async def test_a_reload_says_which_budget_it_has_replaced(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'store.db'}"
    async with running(tmp_path, BASE, store=store) as service:
        await service.ask("PATCH", "/budgets?scope=", FIVE_A_DAY)
        service.path.write_text(HUNDRED)
        await service.ask("POST", "/scheduler/reload")
        actions = [one["action"] for one in (await service.get("/audit"))["entries"]]
        assert sorted(actions) == ["budget.patch", "budget.replace", "settings.reload"]
    assert Restarts(tmp_path).diagnosed() == [("warn", REPLACED)]


async def test_a_deletion_by_hand_ends_when_the_file_says_another_limit(
    restarts: Restarts, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path / 'store.db'}"
    async with running(tmp_path, HUNDRED, store=store) as service:
        assert (await service.ask("DELETE", "/budgets?scope=")).status == 200
    assert await restarts.shown(HUNDRED) == []
    assert await restarts.shown(HUNDRED.replace("100", "50")) == [("50.00", None, "none")]
    line = "budget root: the deletion by hand was replaced by the file: $50.00"
    assert restarts.diagnosed() == [("warn", line)]
