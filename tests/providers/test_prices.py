"""The price of a call: rounded up, never zero for want of a price, the same however it is asked."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal, localcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.money import MAX_RESERVATION_TOKENS
from headgate.errors import CallerError, InvalidAmountError
from headgate.providers.prices import Cost, Price, PriceList, UnknownPriceError

PUBLISHED = PriceList()
OWN = PriceList({"mine": Price(input_usd="0.50", output_usd="1.50")})
CACHING = PriceList(
    {"mine": Price(input_usd=3, output_usd=15, cache_read_usd="0.30", cache_write_usd="3.75")}
)

OVERRIDDEN: list[tuple[PriceList, dict[str, int], int]] = [
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
    prices: PriceList, usage: dict[str, int], micro_usd: int
) -> None:
    assert prices.cost("mine", **usage).micro_usd == micro_usd


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
    prices = PriceList({"gpt-4o": Price(input_usd=1_000, output_usd=0)})
    assert prices.cost("gpt-4o", input_tokens=1, output_tokens=0).micro_usd == 1_000


@pytest.mark.parametrize("model", ["no-such-model", "", "x" * 100_000, "no-such/gpt", "/", "\x00"])
def test_an_unknown_model_is_refused(model: str) -> None:
    with pytest.raises(UnknownPriceError, match=r"add \[prices\.") as caught:
        PUBLISHED.cost(model, input_tokens=1, output_tokens=1)
    assert isinstance(caught.value, CallerError)
    assert caught.value.model == model
    assert len(str(caught.value)) < 600


def test_a_model_that_is_not_sold_by_the_token_is_refused() -> None:
    with pytest.raises(UnknownPriceError, match="no known price for tokens"):
        PUBLISHED.cost("whisper-1", input_tokens=1_000_000, output_tokens=0)


def test_a_default_stands_in_for_an_unknown_model_only() -> None:
    prices = PriceList(default=Price(input_usd=10, output_usd=30))
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


BAD_USAGE: list[tuple[dict[str, int], str]] = [
    ({"input_tokens": -1, "output_tokens": 0}, "input_tokens"),
    ({"input_tokens": 0, "output_tokens": 10**13}, "output_tokens"),
    ({"input_tokens": 0, "output_tokens": 0, "cache_read_tokens": 1}, "input_tokens"),
    (
        {"input_tokens": 5, "output_tokens": 0, "cache_read_tokens": 3, "cache_write_tokens": 3},
        "input_tokens",
    ),
]


@pytest.mark.parametrize(("usage", "field"), BAD_USAGE)
def test_usage_that_cannot_be_is_refused(usage: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidAmountError) as caught:
        OWN.cost("mine", **usage)
    assert caught.value.field == field


@pytest.mark.parametrize("bad", ["nan", "-1", "free", 2_000_000])
def test_a_price_that_cannot_be_is_refused_when_it_is_set(bad: str | int) -> None:
    with pytest.raises(InvalidAmountError, match=r"overrides\[mine\]\.output_usd"):
        PriceList({"mine": Price(input_usd=1, output_usd=bad)})


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
    usage = {"input_tokens": 123_457, "output_tokens": 98_765}
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


def test_without_the_list_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["genai_prices"] = None
from headgate.providers.prices import Price, PriceList, UnknownPriceError
try:
    PriceList().cost("gpt-4o", input_tokens=1, output_tokens=1)
except UnknownPriceError as error:
    print(error)
print(PriceList(default=Price(input_usd=1, output_usd=1)).cost(
    "gpt-4o", input_tokens=1, output_tokens=1).micro_usd)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert "pip install 'headgate[prices]'" in first
    assert second == "2"
