"""What fifty pages ask for at once is made once."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path

import pytest

from dashboard.browser import Browser, serving, until, without_form_numbers
from headgate.dashboard import page
from headgate.dashboard.page import MAX_KEPT, Recent
from headgate.errors import StoreUnavailableError


class Maker:
    """Makes numbers; `release` lets those go on that wait."""

    def __init__(self) -> None:
        self.made = 0
        self.release = asyncio.Event()
        self.failure: Exception | None = None

    async def __call__(self) -> int:
        self.made += 1
        number = self.made
        await self.release.wait()
        if self.failure is not None:
            raise self.failure
        return number


async def test_those_who_ask_together_get_one_result() -> None:
    maker, kept = Maker(), Recent[int](lambda: 7.5)
    asking = [asyncio.create_task(kept.get(("key",), maker)) for _ in range(50)]
    await asyncio.sleep(0)
    maker.release.set()
    assert set(await asyncio.gather(*asking)) == {1}
    assert await kept.get(("key",), maker) == 1
    assert await kept.get(("another",), maker) == 2


@pytest.mark.parametrize(
    ("took_seconds", "fresh_until"),
    [(0.01, 101.0), (0.09, 101.0), (0.25, 103.0), (5.0, 111.0)],
)
async def test_what_takes_long_is_kept_for_ten_times_as_long(
    took_seconds: float, fresh_until: float
) -> None:
    now = 100.0

    async def slow() -> float:
        nonlocal now
        began, now = now, now + took_seconds
        return began

    kept = Recent[float](lambda: now)
    assert await kept.get(("key",), slow) == 100.0
    await asyncio.sleep(0)
    now = fresh_until - 0.5
    assert await kept.get(("key",), slow) == 100.0
    now = fresh_until
    assert await kept.get(("key",), slow) == fresh_until


async def test_one_who_leaves_takes_nothing_from_the_others() -> None:
    maker, kept = Maker(), Recent[int]()
    first, second = (asyncio.create_task(kept.get(("key",), maker)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    maker.release.set()
    assert await second == 1


async def test_a_failure_is_told_to_all_and_not_kept() -> None:
    maker, kept = Maker(), Recent[int]()
    maker.failure = StoreUnavailableError("away")
    asking = [asyncio.create_task(kept.get(("key",), maker)) for _ in range(3)]
    await asyncio.sleep(0)
    maker.release.set()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert {str(one) for one in found} == {"away"}
    maker.failure = None
    assert await kept.get(("key",), maker) == 2


async def test_nothing_is_kept_beyond_the_second_in_which_pages_are_told_of_changes() -> None:
    now = 0.0
    maker, kept = Maker(), Recent[int](lambda: now)
    maker.release.set()
    for moment, number in ((7.2, 1), (7.99, 1), (8.0, 2), (8.99, 2), (9.01, 3)):
        now = moment
        assert await kept.get(("key",), maker) == number


async def test_what_is_old_is_let_go_though_nobody_asks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page, "FRESH_SECONDS", 0.01)
    kept = Recent[Maker]()

    async def make() -> Maker:
        return Maker()

    made = weakref.ref(await kept.get(("key",), make))

    async def is_gone() -> bool:
        return made() is None

    await until(is_gone)


async def test_what_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAKE_SECONDS", 0.01)
    with pytest.raises(StoreUnavailableError, match="did not come in time"):
        await Recent[int]().get(("key",), Maker())


async def test_no_more_is_kept_than_there_is_room_for() -> None:
    maker, kept = Maker(), Recent[int]()
    maker.release.set()
    for number in range(MAX_KEPT + 1):
        await kept.get((number,), maker)
    assert await kept.get((0,), maker) == MAX_KEPT + 2


async def test_what_was_made_under_a_key_is_forgotten_with_what_was_made_below_it() -> None:
    maker, kept = Maker(), Recent[int](lambda: 7.5)
    maker.release.set()
    keys: list[tuple[object, ...]] = [("page",), ("page", "region"), ("other", "region")]
    assert [await kept.get(key, maker) for key in keys] == [1, 2, 3]
    kept.forget(("page",))
    assert [await kept.get(key, maker) for key in keys] == [4, 5, 3]


async def test_who_waits_for_what_is_forgotten_meanwhile_still_gets_it() -> None:
    maker, kept = Maker(), Recent[int](lambda: 7.5)
    waiting = asyncio.create_task(kept.get(("key",), maker))
    await asyncio.sleep(0)
    kept.forget(("key",))
    after = asyncio.create_task(kept.get(("key",), maker))
    await asyncio.sleep(0)
    maker.release.set()
    assert await waiting == 1
    assert await after == 2
    assert await kept.get(("key",), maker) == 2


async def test_one_drawing_serves_visitors_with_secrets_of_their_own(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        first, second = Browser(app), Browser(app)
        secrets = []
        for browser in (first, second):
            await browser.get("/")
            secrets.append(browser.cookies["headgate_csrf"])
        asking = (browser.region("/ui/projects", "switch") for browser in (first, second))
        regions = [without_form_numbers((await one).body) for one in asking]
    assert secrets[0] != secrets[1]
    for secret, region in zip(secrets, regions, strict=True):
        assert region.count(secret.encode()) >= 1
    drawn = {
        region.replace(secret.encode(), b"")
        for secret, region in zip(secrets, regions, strict=True)
    }
    assert len(drawn) == 1
