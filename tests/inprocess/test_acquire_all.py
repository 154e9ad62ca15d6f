"""Several resources at once: no circle of waiting, and all or none."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import LoadScheduler, SharedResource, acquire_all
from headgate.errors import InvalidFieldError, PermitTimeoutError
from headgate.testing import SimulatedLoop, simulate

NAMES = ("database", "gpu", "llm")


def schedulers() -> dict[str, LoadScheduler]:
    return {name: LoadScheduler(None, SharedResource(name)) for name in NAMES}


asks = st.lists(
    st.tuples(
        st.permutations(NAMES),
        st.integers(1, 3),
        st.sampled_from([None, None, 0.5, 3.0]),
        st.sampled_from([None, None, 1.0, 2.0]),
    ),
    min_size=2,
    max_size=12,
)


@settings(deadline=None, max_examples=100)
@given(asks, st.integers(0, 1000))
def test_whatever_is_named_in_whatever_order_everybody_comes_to_an_end(
    wanted: list[tuple[list[str], int, float | None, float | None]], seed: int
) -> None:
    """A circle of waiting would be a `DeadlockError` of the simulation."""

    async def main(loop: SimulatedLoop) -> None:
        known = schedulers()
        holders = dict.fromkeys(NAMES, 0)

        async def work(names: list[str], patience: float | None) -> None:
            try:
                async with acquire_all([known[name] for name in names], "a", timeout=patience):
                    for name in names:
                        holders[name] += 1
                    try:
                        assert all(holders[name] == 1 for name in names)
                        await asyncio.sleep(1)
                    finally:
                        for name in names:
                            holders[name] -= 1
            except PermitTimeoutError:
                return

        tasks = []
        for names, count, timeout, cancel_after in wanted:
            task = asyncio.create_task(work(names[:count], timeout))
            if cancel_after is not None:
                loop.call_later(cancel_after, task.cancel)
            tasks.append(task)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}
        assert all(one.resource.in_use == one.queued == 0 for one in known.values())

    simulate(main, seed=seed)


def test_who_does_not_get_all_in_time_keeps_none() -> None:
    async def main(loop: SimulatedLoop) -> None:
        known = schedulers()
        async with known["llm"].acquire("other"):
            with pytest.raises(PermitTimeoutError) as caught:
                async with acquire_all(known.values(), "a", timeout=2):
                    raise AssertionError
            assert caught.value.resource == "llm"
            assert known["database"].resource.in_use == known["gpu"].resource.in_use == 0
        assert loop.time() == 2

    simulate(main)


def test_the_names_of_resources_are_their_order_so_they_must_differ() -> None:
    async def main(loop: SimulatedLoop) -> None:
        twice = [LoadScheduler(None, SharedResource("llm")) for _ in range(2)]
        with pytest.raises(InvalidFieldError, match="one name"):
            async with acquire_all(twice, "a"):
                raise AssertionError

    simulate(main)
