"""The price of a call: rounded up, never zero for want of a price, the same however it is asked."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal, localcontext
from typing import Any

import pytest
from genai_prices.data import providers
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.money import MAX_RESERVATION_TOKENS, to_micro_usd
from headgate.errors import CallerError, InvalidAmountError
from headgate.providers.prices import Cost, Price, PriceList, UnknownPriceError, nearest_model

PUBLISHED = PriceList()
OWN = PriceList({"mine": Price(input="0.50", output="1.50")})
CACHING = PriceList({"mine": Price(input=3, output=15, cached_input="0.30", cache_write="3.75")})

OVERRIDDEN: list[tuple[PriceList, dict[str, Any], int]] = [
    (OWN, {"input_tokens": 0, "output_tokens": 0}, 0),
    (OWN, {"input_tokens": 1, "output_tokens": 0}, 1),
    (OWN, {"input_tokens": 2, "output_tokens": 0}, 1),
    (OWN, {"input_tokens": 3, "output_tokens": 0}, 2),
    (OWN, {"input_tokens": 0, "output_tokens": 1}, 2),
    (OWN, {"input_tokens": 1_000_000, "output_tokens": 1_000_000}, 2_000_000),
    (OWN, {"input_tokens": 10, "output_tokens": 0, "cache_read_tokens": 10}, 5),
    (CACHING, {"input_tokens": 1_000, "output_tokens": 100}, 4_500),
    (CACHING, {"input_tokens": 1_000, "output_tokens": 0, "cache_read_tokens": 600}, 1_380),
    (CACHING, {"input_tokens": 1_000, "output_tokens": 0, "cache_write_tokens": 400}, 3_300),
]


@pytest.mark.parametrize(("prices", "usage", "micro_usd"), OVERRIDDEN)
def test_an_override_is_dollars_for_a_million_tokens_rounded_up(
    prices: PriceList, usage: dict[str, Any], micro_usd: int
) -> None:
    assert prices.cost("mine", **usage).micro_usd == micro_usd


BESIDE_TOKENS: list[tuple[str, dict[str, Any], int]] = [
    # The list says what an hour in the cache costs, or it is twice the input.
    ("claude-opus-4-1", {"cache_write_1h_tokens": 1_000}, 30_000),
    ("mine", {"cache_write_1h_tokens": 1_000}, 6_000),
    ("mine", {"cache_write_1h_tokens": 400, "cache_write_tokens": 600}, 2_400 + 2_250),
    # Audio has a price of its own where one is published.
    ("gpt-audio", {"audio_input_tokens": 1_000}, 32_000),
    ("mine", {"audio_input_tokens": 1_000}, 3_000),
    ("mine", {"audio_input_tokens": 1_000, "cache_read_tokens": 1_000}, 300),
    # Searches cost what the list says, or what both providers take.
    ("claude-opus-4-1", {"input_tokens": 0, "web_searches": 3}, 30_000),
    ("gpt-5", {"input_tokens": 0, "file_searches": 2}, 5_000),
    ("mine", {"input_tokens": 0, "web_searches": 3, "file_searches": 2}, 35_000),
    # A tier is the provider's own, and an override holds in all of them.
    ("gpt-5", {"service_tier": "default"}, 1_250),
    ("gpt-5", {"service_tier": "priority"}, 2_500),
    ("gpt-5", {"service_tier": "flex"}, 625),
    ("gpt-5", {"service_tier": "no such tier"}, 1_250),
    ("mine", {"service_tier": "priority"}, 3_000),
]


@pytest.mark.parametrize(("model", "usage", "micro_usd"), BESIDE_TOKENS)
def test_what_is_billed_beside_plain_tokens_is_priced(
    model: str, usage: dict[str, Any], micro_usd: int
) -> None:
    assert CACHING.cost(model, **{"input_tokens": 1_000, "output_tokens": 0} | usage).micro_usd == (
        micro_usd
    )


@pytest.mark.parametrize(
    ("usage", "field"),
    [
        ({"cache_write_1h_tokens": 600, "cache_read_tokens": 600}, "input_tokens"),
        ({"audio_input_tokens": 1_001}, "input_tokens"),
        ({"audio_output_tokens": 1}, "output_tokens"),
        ({"web_searches": -1}, "web_searches"),
    ],
)
def test_parts_are_no_larger_than_the_whole(usage: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidAmountError) as caught:
        OWN.cost("mine", input_tokens=1_000, output_tokens=0, **usage)
    assert caught.value.field == field


@settings(deadline=None, max_examples=200)
@given(
    model=st.sampled_from(
        ["gpt-5", "gpt-4o", "o3", "claude-sonnet-4-5", "claude-haiku-5-5", "gemini-2.5-pro"]
    ),
    plain=st.integers(0, 10**6),
    read=st.integers(0, 10**6),
    written=st.integers(0, 10**6),
    output=st.integers(0, 10**6),
)
def test_a_published_price_is_what_the_list_itself_calculates(
    model: str, plain: int, read: int, written: int, output: int
) -> None:
    usage: dict[str, Any] = {
        "input_tokens": plain + read + written,
        "output_tokens": output,
        "cache_read_tokens": read,
        "cache_write_tokens": written,
    }
    makers = [p for p in providers if p.id in ("openai", "anthropic", "google")]
    found = next(m for p in makers for m in p.models if m.id == model)
    exact = found.get_prices(datetime.now(UTC)).calc_price(usage)["total_price"]
    assert PUBLISHED.cost(model, **usage).micro_usd == to_micro_usd(exact)


@settings(deadline=None, max_examples=100)
@given(
    model=st.sampled_from(["gpt-5", "gpt-audio", "claude-sonnet-4-5", "mine"]),
    tier=st.sampled_from(["", "auto", "default", "flex", "priority", "no such tier"]),
    cached=st.tuples(st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**5)),
    output=st.integers(0, 10**5),
    searches=st.integers(0, 10),
)
def test_no_usage_costs_more_than_the_most(
    model: str, tier: str, cached: tuple[int, int, int], output: int, searches: int
) -> None:
    total = sum(cached)
    most = CACHING.most(
        model,
        input_tokens=total,
        output_tokens=output,
        service_tier=tier,
        web_searches=searches,
    )
    cost = CACHING.cost(
        model,
        input_tokens=total,
        output_tokens=output,
        cache_read_tokens=cached[0],
        cache_write_tokens=cached[1],
        cache_write_1h_tokens=cached[2],
        audio_output_tokens=output // 2,
        web_searches=searches,
        service_tier=tier,
    )
    assert cost.micro_usd <= most.micro_usd
    assert cost.tokens == most.tokens


@settings(deadline=None, max_examples=100)
@given(
    model=st.sampled_from(["gpt-5", "gpt-audio", "claude-sonnet-4-5", "gemini-2.5-pro", "mine"]),
    tier=st.sampled_from(["", "flex", "priority", "no such tier"]),
    given_tokens=st.integers(0, 2 * 10**9),
    output=st.integers(0, 2 * 10**9),
)
def test_two_plain_counts_cost_what_they_cost_among_others(
    model: str, tier: str, given_tokens: int, output: int
) -> None:
    usage: dict[str, Any] = {"input_tokens": given_tokens, "output_tokens": output}
    searched = CACHING.cost(model, **usage, web_searches=1, service_tier=tier)
    rates = CACHING._rates(model, given_tokens, tier=tier)
    plain = CACHING.cost(model, **usage, service_tier=tier)
    assert plain.tokens == searched.tokens
    # A search costs whole micro-dollars, so that nothing is rounded by it.
    assert plain.micro_usd == searched.micro_usd - rates.web_search // 10**12


def test_published_prices_are_known_without_a_network() -> None:
    cost = PUBLISHED.cost("gpt-4o", input_tokens=1_000, output_tokens=1_000)
    assert cost == Cost(micro_usd=cost.micro_usd, tokens=cost.tokens)
    assert 1_000 < cost.micro_usd < 100_000
    assert cost.tokens == 2_000


def test_a_model_may_be_named_with_its_provider() -> None:
    plain = PUBLISHED.cost("claude-sonnet-4-5", input_tokens=1_000, output_tokens=10)
    assert PUBLISHED.cost("anthropic/claude-sonnet-4-5", input_tokens=1_000, output_tokens=10) == (
        plain
    )


def test_a_cost_in_dollars_is_what_a_tracker_takes() -> None:
    cost = OWN.cost("mine", input_tokens=3, output_tokens=0)
    assert cost.usd == Decimal("0.000002")


def test_an_override_comes_before_the_published_price() -> None:
    prices = PriceList({"gpt-4o": Price(input=1_000, output=0)})
    assert prices.cost("gpt-4o", input_tokens=1, output_tokens=0).micro_usd == 1_000


def test_a_price_that_was_asked_for_follows_other_overrides_at_once() -> None:
    prices = PriceList({"gpt-4o": Price(input=1_000, output=0)}, default=Price(input=3, output=3))
    assert prices.cost("gpt-4o", input_tokens=1, output_tokens=0).micro_usd == 1_000
    assert prices.cost("no-such-model", input_tokens=1, output_tokens=0).micro_usd == 3
    prices.change({"gpt-4o": Price(input=7, output=0), "no-such-*": Price(input=9, output=9)})
    assert prices.cost("gpt-4o", input_tokens=1, output_tokens=0).micro_usd == 7
    assert prices.cost("no-such-model", input_tokens=1, output_tokens=0).micro_usd == 9


@pytest.mark.parametrize(
    "model", ["no-such-model", "", "x" * 100_000, "no-such/gpt", "/", "\x00", "own-moderation"]
)
def test_an_unknown_model_is_refused(model: str) -> None:
    with pytest.raises(UnknownPriceError, match=r"add \[prices\.") as caught:
        PUBLISHED.cost(model, input_tokens=1, output_tokens=1)
    assert isinstance(caught.value, CallerError)
    assert caught.value.model == model
    assert len(str(caught.value)) < 600


def test_a_model_that_is_not_sold_by_the_token_is_refused() -> None:
    with pytest.raises(UnknownPriceError, match="no known price for tokens"):
        PUBLISHED.cost("whisper-1", input_tokens=1_000_000, output_tokens=0)


def test_embeddings_have_no_price_for_output_and_need_none() -> None:
    assert PUBLISHED.is_known("text-embedding-3-small")
    cost = PUBLISHED.cost("text-embedding-3-small", input_tokens=1_000_000, output_tokens=1)
    assert cost.micro_usd == 20_000


def test_a_default_stands_in_for_an_unknown_model_only() -> None:
    prices = PriceList(default=Price(input=10, output=30))
    assert prices.cost("no-such-model", input_tokens=1, output_tokens=1).micro_usd == 40
    known = prices.cost("gpt-4o", input_tokens=1_000, output_tokens=0)
    assert known == PUBLISHED.cost("gpt-4o", input_tokens=1_000, output_tokens=0)


@pytest.mark.parametrize(("characters", "tokens"), [(0, 0), (1, 1), (4, 1), (5, 2), (4_000, 1_000)])
def test_four_characters_are_taken_for_a_token_rounded_up(characters: int, tokens: int) -> None:
    by_characters = OWN.estimate("mine", prompt_chars=characters, max_tokens=100)
    assert by_characters == OWN.estimate("mine", input_tokens=tokens, max_tokens=100)
    assert by_characters.tokens == tokens + 100


@pytest.mark.parametrize("given_twice", [{}, {"prompt_chars": 4, "input_tokens": 1}])
def test_an_estimate_takes_the_prompt_once(given_twice: dict[str, int]) -> None:
    with pytest.raises(InvalidAmountError, match="either"):
        OWN.estimate("mine", max_tokens=1, **given_twice)


BAD_USAGE: list[tuple[dict[str, Any], str]] = [
    ({"input_tokens": -1, "output_tokens": 0}, "input_tokens"),
    ({"input_tokens": 0, "output_tokens": 10**13}, "output_tokens"),
    ({"input_tokens": 0, "output_tokens": 0, "cache_read_tokens": 1}, "input_tokens"),
    (
        {"input_tokens": 5, "output_tokens": 0, "cache_read_tokens": 3, "cache_write_tokens": 3},
        "input_tokens",
    ),
]


@pytest.mark.parametrize(("usage", "field"), BAD_USAGE)
def test_usage_that_cannot_be_is_refused(usage: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidAmountError) as caught:
        OWN.cost("mine", **usage)
    assert caught.value.field == field


@pytest.mark.parametrize("bad", ["nan", "-1", "free", 2_000_000])
def test_a_price_that_cannot_be_is_refused_when_it_is_set(bad: str | int) -> None:
    with pytest.raises(InvalidAmountError, match=r"overrides\[mine\]\.output"):
        PriceList({"mine": Price(input=1, output=bad)})


@settings(deadline=None, max_examples=60)
@given(
    model=st.sampled_from(["gpt-4o", "claude-sonnet-4-5", "gemini-2.5-pro", "mine"]),
    most=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    parts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_a_call_within_its_estimate_costs_no_more(
    model: str, most: tuple[int, int], parts: tuple[float, float]
) -> None:
    estimate = OWN.estimate(model, input_tokens=most[0], max_tokens=most[1])
    cost = OWN.cost(
        model, input_tokens=int(most[0] * parts[0]), output_tokens=int(most[1] * parts[1])
    )
    assert cost.micro_usd <= estimate.micro_usd


def test_prices_do_not_depend_on_the_decimal_context_of_the_program() -> None:
    usage: dict[str, Any] = {"input_tokens": 123_457, "output_tokens": 98_765}
    exact = PUBLISHED.cost("gpt-4o", **usage)
    with localcontext(prec=2):
        assert PUBLISHED.cost("gpt-4o", **usage) == exact


def test_the_largest_usage_is_an_error_and_not_a_wrong_number() -> None:
    with pytest.raises(InvalidAmountError, match="cost"):
        PUBLISHED.cost("gpt-4o", input_tokens=MAX_RESERVATION_TOKENS, output_tokens=0)


def test_the_list_is_not_loaded_before_it_is_asked() -> None:
    code = "import sys, headgate, headgate.providers.prices as p; p.PriceList()"
    check = "sys.exit('genai_prices' in sys.modules)"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True)


def price(dollars: int) -> Price:
    return Price(input=dollars, output=dollars)


PATTERNS = {
    "*": price(1),
    "gpt-*": price(2),
    "gpt-5*": price(3),
    "gpt-5-mini": price(4),
    "gpt-?-mini": price(5),
    "claude[1m]": price(6),
    "acme/gpt-5*": price(7),
    "*-mini": price(8),
}


@pytest.mark.parametrize(
    ("model", "dollars"),
    [
        ("gpt-5-mini", 4),
        ("GPT-5-Mini", 4),
        ("gpt-5-nano", 3),
        ("gpt-4o", 2),
        ("gpt-4-mini", 5),
        ("o4-mini", 8),
        ("llama", 1),
        ("claude[1m]", 6),
        ("claude1", 6),
        ("openai/gpt-5-mini", 4),
        ("acme/gpt-5-mini", 7),
    ],
)
def test_the_most_specific_pattern_wins(model: str, dollars: int) -> None:
    for overrides in (PATTERNS, dict(reversed(PATTERNS.items()))):
        cost = PriceList(overrides).cost(model, input_tokens=1_000_000, output_tokens=0)
        assert cost.micro_usd == dollars * 1_000_000


def test_a_model_with_its_provider_has_the_price_of_the_model_alone() -> None:
    prices = PriceList({"gpt-5*": price(3)})
    assert prices.cost("openai/gpt-5", input_tokens=1_000_000, output_tokens=0).usd == 3


def test_costs_of_many_outputs_refuse_what_the_cost_of_one_refuses() -> None:
    with pytest.raises(InvalidAmountError):
        PriceList().plain_costs("gpt-5", input_tokens=1, output_tokens=[5, -5])


def test_overrides_change_while_the_list_is_in_use() -> None:
    prices = PriceList({"mine": price(1)})
    assert (prices.is_known("mine"), prices.is_known("yours")) == (True, False)
    prices.change({"yours": price(2)})
    assert (prices.is_known("mine"), prices.is_known("yours")) == (False, True)
    assert prices.is_known("gpt-4o")


@given(st.text("ab*?[]/", max_size=12), st.text("ab*?[]/", max_size=12))
def test_whatever_is_written_as_a_pattern_is_a_pattern_of_itself(one: str, other: str) -> None:
    prices = PriceList({one: price(1), other: price(2)})
    assert prices.cost(other, input_tokens=1_000_000, output_tokens=0).usd == 2


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("gpt-4o-min", "gpt-4o-mini"),
        ("claude-haiku-45", "claude-haiku-4-5"),
        ("mystery-9", ""),
        ("claude-nonsense-9", ""),
        ("whisper-1", ""),
        ("text-embedding-3-small", ""),
    ],
)
def test_the_nearest_model_with_a_price_is_found(typed: str, meant: str) -> None:
    assert nearest_model(typed) == meant
