"""Task weights by model: how much a call to a model counts in the depth of a queue.

A weight is a proxy for cost, not a price. The rule it keeps: the most specific tier that a model's
name contains decides, whatever the order in which the vendor writes tier, version and date.
"""

from __future__ import annotations

import re

from headgate.errors import InvalidSettingError

TIER_WEIGHTS = {
    "opus": 5.0,
    "sonnet": 2.0,
    "haiku": 1.0,
    "o3": 5.0,
    "o1": 5.0,
    "gpt-4o": 3.0,
    "gpt-4o-mini": 1.0,
    "gemini-pro": 3.0,
    "gemini-flash": 1.0,
}
UNKNOWN_WEIGHT = 2.0

CHARS_PER_TOKEN = 4
TOKENS_PER_WEIGHT = 1000

_TIERS = sorted(
    ((tier.split("-"), weight) for tier, weight in TIER_WEIGHTS.items()),
    key=lambda entry: -len(entry[0]),
)


def model_weight(model: str) -> float:
    """Return the weight of a model's tier, by its name in full: `gpt-4o-mini-2024-07-18`."""
    words = re.split(r"[^a-z0-9]+", model.lower())
    for tier_words, weight in _TIERS:
        if _in_order(tier_words, words):
            return weight
    return UNKNOWN_WEIGHT


def estimate_weight(model: str, prompt_chars: int) -> float:
    """Return the weight of a task: its model's, times the prompt's thousands of tokens, at least 1.

    Four characters are taken for a token.
    """
    if prompt_chars < 0:
        raise InvalidSettingError("prompt_chars", f"must be at least 0, not {prompt_chars}")
    input_tokens = prompt_chars / CHARS_PER_TOKEN
    return model_weight(model) * max(input_tokens / TOKENS_PER_WEIGHT, 1.0)


def _in_order(wanted: list[str], words: list[str]) -> bool:
    """Say whether the wanted words occur in this order; versions may stand between them."""
    remaining = iter(words)
    return all(word in remaining for word in wanted)
