"""Calls of the real SDKs take a permit, hold their estimate, and are booked at what they used."""

from __future__ import annotations

import asyncio
import pickle

import anthropic
import httpx2
import openai
import pytest

from executors.endpoint import Seen, free_port, reply
from headgate import BudgetExceededError
from headgate.errors import PermitTimeoutError
from headgate.providers.prices import UnknownPriceError
from headgate.providers.requests import read_call
from inprocess.sdk import upstream
from inprocess.sdk.scene import COST, MAX_TOKENS, SCOPE, Sdk, scene
from inprocess.sdk.upstream import Stream, each, whole, zipped

LIMITED = reply(429, b'{"error": {"message": "slow down"}}', Retry_After_Ms="1")
FAILED = reply(500, b'{"error": {"message": "broken"}}', Retry_After_Ms="1")
BAD = reply(400, b'{"error": {"message": "no such field"}}')

TIMEOUTS = (httpx2.TimeoutException, openai.APITimeoutError, anthropic.APITimeoutError)


def estimate_of(seen: Seen) -> tuple[int, int]:
    """Return what a request is estimated at, in micro-dollars and tokens."""
    asked = read_call(seen.path, seen.body)
    input_tokens = -(-asked.prompt_chars // 4)
    return input_tokens + 10 * MAX_TOKENS, input_tokens + MAX_TOKENS


def plus(*amounts: tuple[int, int]) -> tuple[int, int]:
    return sum(usd for usd, _ in amounts), sum(tokens for _, tokens in amounts)


USED = (COST, upstream.TOKENS)


async def test_an_answer_is_booked_at_what_it_used(sdk: Sdk) -> None:
    async with scene(whole(sdk.body)) as made:
        assert await sdk.ask(made) == upstream.TEXT
        assert await made.booked() == USED


async def test_a_compressed_answer_is_read_too(sdk: Sdk) -> None:
    async with scene(zipped(sdk.body)) as made:
        assert await sdk.ask(made) == upstream.TEXT
        assert await made.booked() == USED
        assert set(made.endpoint.seen[0].headers["accept-encoding"].split(", ")) <= {
            "gzip",
            "deflate",
        }


async def test_a_stream_is_booked_at_what_its_events_say(sdk: Sdk) -> None:
    async with scene(Stream(sdk.events)) as made:
        assert await sdk.ask(made, stream=True) == upstream.TEXT
        assert await made.booked() == USED


async def test_a_compressed_stream_is_read_too(sdk: Sdk) -> None:
    async with scene(Stream(sdk.events, coding="gzip")) as made:
        assert await sdk.ask(made, stream=True) == upstream.TEXT
        assert await made.booked() == USED


async def test_permit_and_money_are_held_while_a_call_is_under_way(sdk: Sdk) -> None:
    answer = Stream(sdk.events, hang_after=3)
    async with scene(answer) as made:
        asking = asyncio.ensure_future(sdk.ask(made, stream=True, timeout=0.3))
        await answer.hanging.wait()
        assert made.resource.in_use == 1
        assert await made.reserved() == estimate_of(made.endpoint.seen[0])
        with pytest.raises(TIMEOUTS):
            await asking
        assert await made.booked() == estimate_of(made.endpoint.seen[0])


async def test_a_budget_that_is_too_small_refuses_once_and_sends_nothing(sdk: Sdk) -> None:
    async with scene(whole(sdk.body)) as made:
        await made.tracker.set_budget(SCOPE, limit_usd="0.0005")
        with pytest.raises(BudgetExceededError) as refused:
            await sdk.ask(made, retries=2)
        assert made.endpoint.seen == []
        assert await made.booked() == (0, 0)
        assert made.scheduler.tick == 1
        again = pickle.loads(pickle.dumps(refused.value))
        assert (type(again), again.limit) == (BudgetExceededError, 500)


async def test_a_model_without_a_price_is_refused(sdk: Sdk) -> None:
    async with scene(whole(sdk.body)) as made:
        with pytest.raises(UnknownPriceError, match="give prices=PriceList"):
            await sdk.ask(made, retries=2, model="house-model")
        assert made.endpoint.seen == []
        assert await made.booked() == (0, 0)


async def test_a_model_without_a_price_is_sent_where_only_tokens_are_limited(sdk: Sdk) -> None:
    async with scene(whole(sdk.body)) as made:
        await made.tracker.set_budget(SCOPE, limit_tokens=10_000)
        assert await sdk.ask(made, model="house-model") == upstream.TEXT
        assert await made.booked() == (0, USED[1])


async def test_a_model_without_a_price_is_sent_and_booked_at_the_estimate(sdk: Sdk) -> None:
    async with scene(whole(sdk.body), estimate_usd="0.25") as made:
        assert await sdk.ask(made, model="house-model") == upstream.TEXT
        assert await made.booked() == (250_000, USED[1])


async def test_no_permit_in_time_is_told_and_not_tried_again(sdk: Sdk) -> None:
    async with scene(whole(sdk.body), max_wait_seconds=0.01) as made:
        async with made.scheduler.acquire("other"):
            with pytest.raises(PermitTimeoutError):
                await sdk.ask(made, retries=2)
        assert made.endpoint.seen == []
        assert await made.booked() == (0, 0)


async def test_a_rate_limit_costs_nothing_and_each_try_is_its_own(sdk: Sdk) -> None:
    async with scene(each(LIMITED, LIMITED, whole(sdk.body))) as made:
        assert await sdk.ask(made, retries=2) == upstream.TEXT
        assert await made.booked() == USED
        journal = await made.tracker.journal(SCOPE)
        assert len({entry.reservation_id for entry in journal if entry.reservation_id}) == 3


async def test_server_errors_before_any_output_cost_nothing(sdk: Sdk) -> None:
    async with scene(each(FAILED, FAILED, FAILED, whole(sdk.body))) as made:
        assert await sdk.ask(made, retries=3) == upstream.TEXT
        assert await made.booked() == USED


@pytest.mark.parametrize("status", [408, 504])
async def test_a_gateway_that_stopped_waiting_is_assumed_to_have_cost_the_estimate(
    sdk: Sdk, status: int
) -> None:
    async with scene(each(reply(status), whole(sdk.body))) as made:
        assert await sdk.ask(made, retries=1) == upstream.TEXT
        assert await made.booked() == plus(USED, estimate_of(made.endpoint.seen[0]))


async def test_a_refused_request_costs_nothing(sdk: Sdk) -> None:
    async with scene(BAD) as made:
        with pytest.raises(Exception, match="no such field"):
            await sdk.ask(made, retries=2)
        assert await made.booked() == (0, 0)


async def test_a_lost_connection_is_assumed_to_have_cost_the_estimate(sdk: Sdk) -> None:
    async with scene(each(b"", whole(sdk.body))) as made:
        assert await sdk.ask(made, retries=1) == upstream.TEXT
        assert await made.booked() == plus(USED, estimate_of(made.endpoint.seen[0]))


async def test_a_refused_connection_costs_nothing(sdk: Sdk) -> None:
    async with scene() as made:
        made.endpoint.port = free_port()
        with pytest.raises(Exception, match="Connection error"):
            await sdk.ask(made)
        assert await made.booked() == (0, 0)


@pytest.mark.parametrize("cut_after", [0, 1, 2])
async def test_a_stream_that_is_cut_off_costs_the_estimate(sdk: Sdk, cut_after: int) -> None:
    async with scene(Stream(sdk.events, cut_after=cut_after)) as made:
        with pytest.raises(Exception, match=r"(?i)connection|incomplete|peer"):
            await sdk.ask(made, stream=True)
        assert await made.booked() == estimate_of(made.endpoint.seen[0])


async def test_counts_before_the_last_event_may_not_be_all(sdk: Sdk) -> None:
    async with scene(Stream(sdk.events, cut_after=len(sdk.events) - 1)) as made:
        with pytest.raises(Exception, match=r"(?i)connection|incomplete|peer"):
            await sdk.ask(made, stream=True)
        assert await made.booked() == estimate_of(made.endpoint.seen[0])


async def test_parallel_calls_do_not_pass_a_budget_together(sdk: Sdk) -> None:
    async with scene(each(*[whole(sdk.body)] * 5)) as made:
        await sdk.ask(made)
        usd, _ = estimate_of(made.endpoint.seen[0])
        # After the first call there is room for two more at what they cost, and for no estimate
        # beyond these.
        limit = COST * 3 + usd - 1
        await made.tracker.set_budget(SCOPE, limit_usd=f"0.{limit:06d}")
        asked = [sdk.ask(made) for _ in range(4)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, BudgetExceededError)]
        assert (len(refused), len(made.endpoint.seen)) == (2, 3)
        assert await made.booked() == plus(USED, USED, USED)
