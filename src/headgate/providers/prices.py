"""What a call to a model costs: before it, as an estimate to reserve, and after it.

The prices are those that genai-prices carries along, so nothing is fetched; overrides come first,
by patterns such as `gpt-5*`. The most specific one counts: the name itself, then the pattern with
the longest beginning before its first wildcard, then the longest pattern.
Rule: a model without a known price is refused unless a default is set, because a price of zero
would let it spend without end. Every result is in whole micro-dollars, rounded up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Context, Decimal, localcontext
from fnmatch import translate
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from headgate.core.money import MicroUsd, Tokens, to_micro_usd, to_tokens
from headgate.errors import CallerError, InvalidAmountError

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, Provider


Dollars = Decimal | float | str

CHARACTERS_PER_TOKEN = 4
MAX_MODELS_CACHED = 1_024
MAX_MODEL_LENGTH = 200
_TOKENS_PER_PRICE = 1_000_000
_WILDCARD = re.compile(r"[*?\[]")


class UnknownPriceError(CallerError):
    """Nobody said what a model costs, so a call to it cannot be reserved."""

    def __init__(self, model: str, problem: str = "has no known price") -> None:
        name = model[:MAX_MODEL_LENGTH]
        super().__init__(f"model {name!r} {problem}; {price_advice(name)}, or give an estimate")
        self.model = model


def price_advice(model: str) -> str:
    """Return the lines that give a model a price, for somebody who is to add them."""
    name = msgspec.json.encode(model[:MAX_MODEL_LENGTH]).decode()
    return f"add [prices.{name}] with input = … and output = … in dollars a million tokens"


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars for a million tokens; what is left out costs as much as other input."""

    input: Dollars
    output: Dollars
    cached_input: Dollars | None = None
    cache_write: Dollars | None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a call costs, or is expected to cost at most, and how many tokens that is."""

    micro_usd: MicroUsd
    tokens: Tokens

    @property
    def usd(self) -> Decimal:
        """The same in dollars, exactly: the amount that a tracker takes."""
        return Decimal(self.micro_usd).scaleb(-6)


class _Usage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0


class _Rates(msgspec.Struct, frozen=True, kw_only=True):
    """A price in micro-dollars for a million tokens."""

    input: int
    output: int
    cache_read: int
    cache_write: int


class PriceList:
    """Prices by model name, as it is sent to the provider; `provider/model` works too.

    The overrides are by name or by pattern, in either case of letters.
    """

    def __init__(
        self, overrides: Mapping[str, Price] | None = None, *, default: Price | None = None
    ) -> None:
        self._overrides = _Overrides(overrides or {})
        self._default = None if default is None else _rates(default, "default")

    def change(self, overrides: Mapping[str, Price]) -> None:
        """Go by other overrides from now on, whoever uses the list."""
        self._overrides = _Overrides(overrides)

    def is_known(self, model: str) -> bool:
        """Tell whether a call to a model has a price; without one, `cost` refuses it."""
        try:
            self._micro_usd(model, _Usage(input_tokens=1, output_tokens=1))
        except UnknownPriceError:
            return False
        return True

    def estimate(
        self,
        model: str,
        *,
        max_tokens: int,
        prompt_chars: int | None = None,
        input_tokens: int | None = None,
    ) -> Cost:
        """Price a call before it is made, as if it used all of `max_tokens`.

        The prompt is given in characters, of which four are taken for a token, or in tokens.
        """
        if (prompt_chars is None) == (input_tokens is None):
            problem = "give either the characters of the prompt or its tokens"
            raise InvalidAmountError("prompt_chars", problem)
        if prompt_chars is not None:
            characters = to_tokens(prompt_chars, field="prompt_chars")
            input_tokens = -(-characters // CHARACTERS_PER_TOKEN)
        return self.cost(model, input_tokens=input_tokens or 0, output_tokens=max_tokens)

    def cost(
        self,
        model: str,
        *,
        input_tokens: int,
        output_tokens: int,
        cache_read_tokens: int = 0,
        cache_write_tokens: int = 0,
    ) -> Cost:
        """Price a call by its usage; `input_tokens` counts everything, from the cache or not."""
        usage = _Usage(
            input_tokens=to_tokens(input_tokens, field="input_tokens"),
            output_tokens=to_tokens(output_tokens, field="output_tokens"),
            cache_read_tokens=to_tokens(cache_read_tokens, field="cache_read_tokens"),
            cache_write_tokens=to_tokens(cache_write_tokens, field="cache_write_tokens"),
        )
        if usage.cache_read_tokens + usage.cache_write_tokens > usage.input_tokens:
            problem = "must also count what was read from and written to the cache"
            raise InvalidAmountError("input_tokens", problem)
        total = Tokens(usage.input_tokens + usage.output_tokens)
        return Cost(micro_usd=self._micro_usd(model, usage), tokens=total)

    def _micro_usd(self, model: str, usage: _Usage) -> MicroUsd:
        rates = self._overrides.find(model)
        if rates is not None:
            return _priced(usage, rates)
        try:
            return _published(model, usage)
        except UnknownPriceError:
            if self._default is None:
                raise
            return _priced(usage, self._default)


class _Overrides:
    """Rates by patterns of models, the most specific first."""

    def __init__(self, overrides: Mapping[str, Price]) -> None:
        named = {
            pattern.lower(): _rates(price, f"overrides[{pattern}]")
            for pattern, price in overrides.items()
        }
        self._exact = named
        self._patterns = [
            (re.compile(translate(pattern)), named[pattern])
            for pattern in sorted(named, key=_specificity)
            if _WILDCARD.search(pattern)
        ]
        self._found: dict[str, _Rates | None] = {}

    def find(self, model: str) -> _Rates | None:
        """Return the rates of a model.

        What names a provider, as `acme/gpt-5*`, is asked for names with one, and before the rest.
        """
        if not self._exact or len(model) > MAX_MODEL_LENGTH:
            return None
        if model not in self._found:
            if len(self._found) >= MAX_MODELS_CACHED:
                self._found.clear()
            self._found[model] = self._most_specific(model.lower())
        return self._found[model]

    def _most_specific(self, name: str) -> _Rates | None:
        if name in self._exact:
            return self._exact[name]
        has_provider = "/" in name
        for pattern, rates in self._patterns:
            if ("/" in pattern.pattern) is has_provider and pattern.match(name):
                return rates
        return self._most_specific(name.partition("/")[2]) if has_provider else None


def _specificity(pattern: str) -> tuple[int, int, str]:
    wildcard = _WILDCARD.search(pattern)
    literal = len(pattern) if wildcard is None else wildcard.start()
    return -literal, -len(pattern), pattern


def _rates(price: Price, field: str) -> _Rates:
    def rate(name: str, amount: Dollars | None) -> int:
        chosen = price.input if amount is None else amount
        return to_micro_usd(chosen, field=f"{field}.{name}")

    return _Rates(
        input=rate("input", price.input),
        output=rate("output", price.output),
        cache_read=rate("cached_input", price.cached_input),
        cache_write=rate("cache_write", price.cache_write),
    )


def _priced(usage: _Usage, rates: _Rates) -> MicroUsd:
    plain = usage.input_tokens - usage.cache_read_tokens - usage.cache_write_tokens
    total = (
        plain * rates.input
        + usage.cache_read_tokens * rates.cache_read
        + usage.cache_write_tokens * rates.cache_write
        + usage.output_tokens * rates.output
    )
    return MicroUsd(-(-total // _TOKENS_PER_PRICE))


def _published(model: str, usage: _Usage) -> MicroUsd:
    found = _find(model)
    if found is None:
        raise UnknownPriceError(model)
    prices = found.get_prices(datetime.now(UTC))
    # What is sold by the hour or by the image has no price for tokens; they would seem free.
    needed = [prices.input_mtok, prices.output_mtok if usage.output_tokens else Decimal(0)]
    if None in needed:
        raise UnknownPriceError(model, "has no known price for tokens")
    # The program's own decimal context may be set to any precision; prices must not depend on it.
    with localcontext(Context(prec=40)):
        total = prices.calc_price(usage)["total_price"]
    return to_micro_usd(total, field="cost")


def _find(model: str) -> ModelInfo | None:
    """Look a model up in the list itself; the package's own lookup remembers names without end."""
    return None if len(model) > MAX_MODEL_LENGTH else _found_in_list(model.lower())


@lru_cache(maxsize=MAX_MODELS_CACHED)
def _found_in_list(name: str) -> ModelInfo | None:
    found = _search(name)
    if found is None and "/" in name:
        provider, _, rest = name.partition("/")
        found = _search(rest, provider_id=provider)
    return found


def _search(name: str, provider_id: str | None = None) -> ModelInfo | None:
    providers = _providers()
    for provider in providers:
        if _offers(provider, name, provider_id):
            found = provider.find_model(name, all_providers=providers)
            if found is not None:
                return found
    return None


def _offers(provider: Provider, name: str, provider_id: str | None) -> bool:
    if provider_id is not None:
        return provider.id == provider_id
    return provider.model_match is not None and provider.model_match.is_match(name)


def _providers() -> list[Provider]:
    from genai_prices.data import providers  # noqa: PLC0415  large, and not always needed

    return providers
