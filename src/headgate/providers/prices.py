"""What a call to a model costs: before it, as an estimate to reserve, and after it.

The prices are those that genai-prices carries along, so nothing is fetched; overrides come first,
by patterns such as `gpt-5*`. The most specific one counts: the name itself, then the pattern with
the longest beginning before its first wildcard, then the longest pattern.
Rule: a model without a known price is refused unless a default is set, because a price of zero
would let it spend without end. Of published prices only those of embeddings may lack one for
output. Every result is in whole micro-dollars, rounded up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import ROUND_CEILING, Context, Decimal, localcontext
from fnmatch import translate
from functools import lru_cache
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from headgate.core.money import (
    MAX_RESERVATION_MICRO_USD,
    MICRO_PER_USD,
    MicroUsd,
    Tokens,
    to_micro_usd,
    to_tokens,
)
from headgate.core.text import VERY_NEAR, did_you_mean, nearest
from headgate.errors import CallerError, InvalidAmountError

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, ModelPrice, Provider


Dollars = Decimal | float | str

CHARACTERS_PER_TOKEN = 4
MAX_MODELS_CACHED = 1_024
MAX_MODEL_LENGTH = 200
WEB_SEARCH_MICRO_USD = 10_000
FILE_SEARCH_MICRO_USD = 2_500
"""What a search by the provider costs where the price of its model does not say."""
_PARTS = 10**12
_SERVICE_TIERS = frozenset(("default", "fast", "flex", "priority"))
_EXACT = Context(prec=60)
_WILDCARD = re.compile(r"[*?\[]")
_USUAL = ("openai", "anthropic", "google")
"""The providers whose models need not be named with them, and are suggested."""


class UnknownPriceError(CallerError):
    """Nobody said what a model costs, so a call to it cannot be reserved."""

    def __init__(self, model: str, problem: str = "has no known price") -> None:
        name = model[:MAX_MODEL_LENGTH]
        super().__init__(f"model {name!r} {problem}; {price_advice(name)}, or give an estimate")
        self.model = model
        self.problem = problem

    def with_advice(self, advice: str) -> str:
        """Return the line for somebody who can follow this advice, after the nearest model."""
        meant = nearest_model(self.model)
        line = f"model {self.model[:MAX_MODEL_LENGTH]!r} {self.problem}"
        return f"{line}; {did_you_mean(meant)} Otherwise {advice}" if meant else f"{line}; {advice}"


def nearest_model(model: str) -> str:
    """Return the model with a published price whose name is nearest; empty if none is near.

    A name that is right gets none: it is not the spelling that keeps it from having a price.
    """
    return _nearest(model[:MAX_MODEL_LENGTH].lower())


@lru_cache(maxsize=1_000)
def _nearest(name: str) -> str:
    names = _usual_models()
    if name in names:
        return ""
    return nearest(name, names, cutoff=VERY_NEAR)


@lru_cache(maxsize=1)
def _usual_models() -> dict[str, ModelInfo]:
    return {model.id: model for one in _providers() if one.id in _USUAL for model in one.models}


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
    """What is priced; the input counts everything, from the cache or not, text or not.

    `cache_write_tokens` are kept for minutes, `cache_write_1h_tokens` for an hour. Audio is a part
    of input and output, and searches are made by the provider for money of their own.
    """

    input_tokens: int
    output_tokens: int
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    cache_write_1h_tokens: int = 0
    audio_input_tokens: int = 0
    audio_output_tokens: int = 0
    web_searches: int = 0
    file_searches: int = 0


class _Rates(msgspec.Struct, frozen=True, kw_only=True):
    """A price in parts of a micro-dollar: `_PARTS` of them are one, for one token or search."""

    input: int
    output: int
    cache_read: int
    cache_write: int
    cache_write_1h: int
    audio_input: int
    audio_output: int
    web_search: int
    file_search: int

    def micro_usd(self, usage: _Usage) -> MicroUsd:
        """Return what a usage costs, rounded up."""
        cached = (
            usage.cache_read_tokens * self.cache_read
            + usage.cache_write_tokens * self.cache_write
            + usage.cache_write_1h_tokens * self.cache_write_1h
        )
        rest = usage.input_tokens - (
            usage.cache_read_tokens + usage.cache_write_tokens + usage.cache_write_1h_tokens
        )
        # Nobody says how much of the audio came from the cache: as much as must have.
        heard, said = min(usage.audio_input_tokens, rest), usage.audio_output_tokens
        total = (
            cached
            + heard * self.audio_input
            + (rest - heard) * self.input
            + said * self.audio_output
            + (usage.output_tokens - said) * self.output
            + usage.web_searches * self.web_search
            + usage.file_searches * self.file_search
        )
        return MicroUsd(-(-total // _PARTS))

    @property
    def dearest_input(self) -> int:
        """What a token of input costs at most, written to a cache or not."""
        return max(self.input, self.cache_write, self.cache_write_1h, self.audio_input)


_MOST_PLAIN = 1_000_000_000
"""Up to this a count need not be looked at any closer."""

_COUNTS = _Usage.__struct_fields__


class _Tiers(msgspec.Struct, frozen=True):
    """The rates of a published price, by the tokens that the input is longer than."""

    rates: tuple[tuple[int, _Rates], ...]

    def find(self, input_tokens: int) -> _Rates:
        if len(self.rates) == 1:
            return self.rates[0][1]
        for start, rates in reversed(self.rates):
            if input_tokens > start:
                return rates
        return self.rates[0][1]


class PriceList:
    """Prices by model name, as it is sent to the provider; `provider/model` works too.

    The overrides are by name or by pattern, in either case of letters.
    """

    def __init__(
        self, overrides: Mapping[str, Price] | None = None, *, default: Price | None = None
    ) -> None:
        self._overrides = _Overrides(overrides or {})
        self._recent: dict[tuple[str, str], tuple[float, _Tiers]] = {}
        """The rates of models and tiers that were asked for, and until when they count."""

        self._default = None if default is None else _rates(default, "default")

    def change(self, overrides: Mapping[str, Price]) -> None:
        """Go by other overrides from now on, whoever uses the list."""
        self._overrides = _Overrides(overrides)
        self._recent.clear()

    def is_known(self, model: str) -> bool:
        """Tell whether a call to a model has a price; without one, `cost` refuses it."""
        try:
            self._rates(model, 1, tier="")
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
        cache_write_1h_tokens: int = 0,
        audio_input_tokens: int = 0,
        audio_output_tokens: int = 0,
        web_searches: int = 0,
        file_searches: int = 0,
        service_tier: str = "",
    ) -> Cost:
        """Price a call by its usage; `input_tokens` counts everything, from the cache or not.

        Cache writes for an hour cost twice the input where the price of the model does not say.
        """
        if (
            type(input_tokens) is type(output_tokens) is int
            and 0 <= input_tokens <= _MOST_PLAIN
            and 0 <= output_tokens <= _MOST_PLAIN
            and cache_read_tokens == 0 == cache_write_tokens == cache_write_1h_tokens
            and audio_input_tokens == 0 == audio_output_tokens == web_searches == file_searches
        ):
            # Every call is priced some times, and nearly always of two plain numbers.
            rates = self._rates(model, input_tokens, tier=service_tier)
            parts = input_tokens * rates.input + output_tokens * rates.output
            return Cost(
                micro_usd=_bookable(-(-parts // _PARTS)),
                tokens=Tokens(input_tokens + output_tokens),
            )
        usage = _Usage(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cache_read_tokens=cache_read_tokens,
            cache_write_tokens=cache_write_tokens,
            cache_write_1h_tokens=cache_write_1h_tokens,
            audio_input_tokens=audio_input_tokens,
            audio_output_tokens=audio_output_tokens,
            web_searches=web_searches,
            file_searches=file_searches,
        )
        for field in _COUNTS:
            to_tokens(getattr(usage, field), field=field)
        cached = usage.cache_read_tokens + usage.cache_write_tokens + usage.cache_write_1h_tokens
        if cached > usage.input_tokens:
            problem = "must also count what was read from and written to the cache"
            raise InvalidAmountError("input_tokens", problem)
        if usage.audio_input_tokens > usage.input_tokens:
            raise InvalidAmountError("input_tokens", "must also count the audio")
        if usage.audio_output_tokens > usage.output_tokens:
            raise InvalidAmountError("output_tokens", "must also count the audio")
        total = Tokens(usage.input_tokens + usage.output_tokens)
        return Cost(micro_usd=self._micro_usd(model, usage, service_tier), tokens=total)

    @property
    def has_own_costs(self) -> bool:
        """Whether a class of somebody else's computes the costs, which is always to be asked."""
        return type(self).cost is not PriceList.cost

    def plain_costs(
        self, model: str, *, input_tokens: int, output_tokens: Sequence[int]
    ) -> list[int]:
        """Price calls with one input, and with outputs of these lengths, in micro-dollars."""
        shortest, longest = min(output_tokens), max(output_tokens)
        is_plain = 0 <= input_tokens <= _MOST_PLAIN and 0 <= shortest <= longest <= _MOST_PLAIN
        if not is_plain or self.has_own_costs:
            return [
                self.cost(model, input_tokens=input_tokens, output_tokens=one).micro_usd
                for one in output_tokens
            ]
        rates = self._rates(model, input_tokens, tier="")
        given, each = input_tokens * rates.input, rates.output
        costs = [-(-(given + one * each) // _PARTS) for one in output_tokens]
        _bookable(max(costs))
        return costs

    def most(
        self,
        model: str,
        *,
        input_tokens: int,
        output_tokens: int,
        service_tier: str = "",
        is_cached_1h: bool = True,
        web_searches: int = 0,
        file_searches: int = 0,
    ) -> Cost:
        """Price a call at most: all input at the dearest rate, all output as speech if it may be.

        Where no tier is named the provider's own settings choose one, so the dearest counts.
        """
        total = to_tokens(input_tokens + output_tokens)
        tiers = (service_tier,) if service_tier in _SERVICE_TIERS else ("", "priority")
        dearest = 0
        for tier in tiers:
            rates = self._rates(model, input_tokens, tier=tier)
            each = rates.dearest_input if is_cached_1h else max(rates.input, rates.cache_write)
            parts = (
                input_tokens * max(each, rates.audio_input)
                + output_tokens * max(rates.output, rates.audio_output)
                + web_searches * rates.web_search
                + file_searches * rates.file_search
            )
            dearest = max(dearest, -(-parts // _PARTS))
        return Cost(micro_usd=_bookable(dearest), tokens=total)

    def context_window(self, model: str) -> int | None:
        """Return how many tokens a model takes and makes at most in all, if that is published."""
        found = _find(model)
        return None if found is None else found.context_window

    def _micro_usd(self, model: str, usage: _Usage, service_tier: str) -> MicroUsd:
        rates = self._rates(model, usage.input_tokens, tier=service_tier)
        return _bookable(rates.micro_usd(usage))

    def _rates(self, model: str, input_tokens: int, *, tier: str) -> _Rates:
        recent = self._recent.get((model, tier))
        if recent is None or recent[0] <= monotonic():
            recent = self._look_up(model, tier)
        tiers = recent[1]
        return tiers.rates[0][1] if len(tiers.rates) == 1 else tiers.find(input_tokens)

    def _look_up(self, model: str, tier: str) -> tuple[float, _Tiers]:
        """Return the rates of a model, and until when they count; none is the default."""
        own = self._overrides.find(model) if self._overrides.are_there else None
        if own is not None:
            found = (inf, _Tiers(((0, own),)))
        else:
            until = monotonic() + LOOKED_UP_SECONDS
            try:
                found = (until, _published(model, tier if tier in _SERVICE_TIERS else ""))
            except UnknownPriceError:
                if self._default is None:
                    raise
                found = (until, _Tiers(((0, self._default),)))
        if len(model) <= MAX_MODEL_LENGTH and len(tier) <= MAX_MODEL_LENGTH:
            if len(self._recent) >= MAX_MODELS_CACHED:
                self._recent.clear()
            self._recent[model, tier] = found
        return found


class _Overrides:
    """Rates by patterns of models, the most specific first."""

    def __init__(self, overrides: Mapping[str, Price]) -> None:
        named = {
            pattern.lower(): _rates(price, f"overrides[{pattern}]")
            for pattern, price in overrides.items()
        }
        self.are_there = bool(named)
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
        return to_micro_usd(chosen, field=f"{field}.{name}") * (_PARTS // MICRO_PER_USD)

    given, made = rate("input", price.input), rate("output", price.output)
    return _Rates(
        input=given,
        output=made,
        cache_read=rate("cached_input", price.cached_input),
        cache_write=rate("cache_write", price.cache_write),
        cache_write_1h=2 * given,
        audio_input=given,
        audio_output=made,
        web_search=WEB_SEARCH_MICRO_USD * _PARTS,
        file_search=FILE_SEARCH_MICRO_USD * _PARTS,
    )


def _bookable(micro_usd: int) -> MicroUsd:
    if micro_usd > MAX_RESERVATION_MICRO_USD:
        to_micro_usd(Decimal(micro_usd).scaleb(-6), field="cost")
    return MicroUsd(micro_usd)


LOOKED_UP_SECONDS = 1.0
"""How long a published price counts before it is looked up again: some change by the hour."""

_UNPRICED = "has no known price for tokens"
_known_tiers: dict[tuple[int, str, int], tuple[ModelPrice, _Tiers | None]] = {}


def _published(model: str, tier: str) -> _Tiers:
    """Return the rates of a model as they are published for now."""
    found = _find(model)
    if found is None:
        raise UnknownPriceError(model)
    now = datetime.now(UTC)
    standard = found.get_prices(now)
    key = (id(standard), tier, now.toordinal())
    known = _known_tiers.get(key)
    if known is None:
        prices = found.get_prices(now, {"service_tier": tier}) if tier else standard
        if len(_known_tiers) >= MAX_MODELS_CACHED:
            _known_tiers.clear()
        # The published price is kept as well: its id is nobody else's as long as it lives.
        known = _known_tiers[key] = (standard, _tiers(prices, is_embedding="embed" in found.id))
    if known[1] is None:
        raise UnknownPriceError(model, _UNPRICED)
    return known[1]


def _tiers(prices: ModelPrice, *, is_embedding: bool) -> _Tiers | None:
    """Return the rates of a published price; None if it has none for tokens.

    What is sold by the hour or by the image would seem free. Embeddings have no output.
    """
    if prices.input_mtok is None or (prices.output_mtok is None and not is_embedding):
        return None
    starts = {0}
    for price in vars(prices).values():
        starts.update(tier.start for tier in getattr(price, "tiers", ()))
    rates = tuple((start, _rates_from(prices, start)) for start in sorted(starts))
    return _Tiers(rates)


def _rates_from(prices: ModelPrice, start: int) -> _Rates:
    """Return the rates of an input that is longer than this; what has no price of its own is input.

    The program's own decimal context may be set to any precision; prices must not depend on it.
    """

    def rate(name: str, otherwise: int = 0, *, parts: int = _PARTS) -> int:
        price = getattr(prices, name)
        if price is None:
            return otherwise
        tiers = getattr(price, "tiers", ())
        reached = [tier.price for tier in tiers if tier.start <= start]
        dollars = reached[-1] if reached else getattr(price, "base", price)
        with localcontext(_EXACT):
            return int((dollars * parts).to_integral_value(ROUND_CEILING))

    given, made = rate("input_mtok"), rate("output_mtok")
    # A price is in dollars for a million tokens or a thousand searches.
    search = 1_000 * _PARTS
    return _Rates(
        input=given,
        output=made,
        cache_read=rate("cache_read_mtok", given),
        cache_write=rate("cache_write_mtok", given),
        cache_write_1h=rate("cache_write_1h_mtok", 2 * given),
        audio_input=rate("input_audio_mtok", given),
        audio_output=rate("output_audio_mtok", made),
        web_search=rate("web_searches_kcount", WEB_SEARCH_MICRO_USD * _PARTS, parts=search),
        file_search=rate("storage_searches_kcount", FILE_SEARCH_MICRO_USD * _PARTS, parts=search),
    )


def _find(model: str) -> ModelInfo | None:
    """Look a model up in the list itself; the package's own lookup remembers names without end."""
    return None if len(model) > MAX_MODEL_LENGTH else _found_in_list(model.lower())


@lru_cache(maxsize=MAX_MODELS_CACHED)
def _found_in_list(name: str) -> ModelInfo | None:
    found = _search(name)
    if found is None and "/" in name:
        provider, _, rest = name.partition("/")
        found = _search(rest, provider_id=provider)
    # The list does not tell by the name of an embedding whose it is. Only the very name counts:
    # some patterns of a provider would catch the models of others.
    return _usual_models().get(name) if found is None else found


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
