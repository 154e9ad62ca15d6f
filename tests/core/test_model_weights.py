from __future__ import annotations

import pytest

from headgate.core.load import TIER_WEIGHTS, estimate_weight, model_weight
from headgate.errors import InvalidSettingError

MODELS = [
    # model                                       weight
    ("haiku",                                     1.0),
    ("sonnet",                                    2.0),
    ("opus",                                      5.0),
    ("claude-sonnet-4-5",                         2.0),
    ("claude-3-5-haiku-20241022",                 1.0),
    ("claude-opus-4-1@20250805",                  5.0),
    ("us.anthropic.claude-3-opus-20240229-v1:0",  5.0),
    ("anthropic/claude-3.5-sonnet",               2.0),
    ("gpt-4o",                                    3.0),
    ("gpt-4o-2024-11-20",                         3.0),
    ("openai/gpt-4o",                             3.0),
    ("gpt-4o-mini",                               1.0),
    ("gpt-4o-mini-2024-07-18",                    1.0),
    ("o1",                                        5.0),
    ("o1-preview",                                5.0),
    ("o3",                                        5.0),
    ("o3-2025-04-16",                             5.0),
    ("gemini-pro",                                3.0),
    ("gemini-2.5-pro",                            3.0),
    ("gemini-flash",                              1.0),
    ("gemini-2.5-flash",                          1.0),
    ("models/gemini-1.5-flash-8b",                1.0),
    ("GPT-4o-Mini",                               1.0),
]  # fmt: skip


@pytest.mark.parametrize(("model", "weight"), MODELS)
def test_weight_of_a_model_by_its_tier(model: str, weight: float) -> None:
    assert model_weight(model) == weight


@pytest.mark.parametrize("model", ["", "mistral-large", "gpt-5", "octopus-7b", "pro", "foo1-bar"])
def test_a_model_of_no_known_tier_weighs_two(model: str) -> None:
    assert model_weight(model) == 2.0


def test_every_tier_is_found_by_its_own_name() -> None:
    assert {tier: model_weight(tier) for tier in TIER_WEIGHTS} == TIER_WEIGHTS


ESTIMATES = [
    # model          prompt_chars   weight
    ("haiku",        0,             1.0),
    ("haiku",        3_999,         1.0),
    ("haiku",        4_000,         1.0),
    ("haiku",        6_000,         1.5),
    ("sonnet",       8_000,         4.0),
    ("gpt-4o",       1,             3.0),
    ("opus",         400_000,       500.0),
    ("never-heard",  40_000,        20.0),
]  # fmt: skip


@pytest.mark.parametrize(("model", "prompt_chars", "weight"), ESTIMATES)
def test_weight_grows_with_the_prompt_beyond_a_thousand_tokens(
    model: str, prompt_chars: int, weight: float
) -> None:
    assert estimate_weight(model, prompt_chars) == weight


def test_a_negative_prompt_length_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="prompt_chars"):
        estimate_weight("haiku", -1)
