"""What a call to a model is to hold before it is sent: as much as it may cost, or will likely cost.

The input is counted: its size in bytes, times the tokens that a byte of the project's prompts has
made with this model; a project without prompts of its own begins with the median of all. The output
is what the request allows, or what most responses in the project stayed below; where neither is
known the call is a probe, of which one at a time is in flight. A call is refused where half of
those like it would not fit into what is left.

`strict_bound` is for budgets that must not be passed at all: every byte is a token, all of it is
written to the dearest cache, and the model writes for as long as it may. Rule: what cannot be
bounded is refused with the reason, and never guessed.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import median

from msgspec.structs import replace

from headgate.core import estimates
from headgate.core.budgets.ledger import Unit
from headgate.core.estimates import FEW_SAMPLES, Basis, Hold, Kind, Reserve
from headgate.errors import CallerError, InvalidAmountError
from headgate.providers.prices import (
    CHARACTERS_PER_TOKEN,
    MAX_MODEL_LENGTH,
    MAX_MODELS_CACHED,
    Cost,
    PriceList,
    UnknownPriceError,
)
from headgate.providers.requests import ModelCall
from headgate.providers.usage import CountedTokens, ReportedUsage

HIDDEN_TOKENS = 500
TOOL_TOKENS = 4_000
"""What a provider adds to a prompt by itself, and beside that if there are tools, at most."""
IMAGE_TOKENS = 16_000
"""What one image is at most."""
SHORT_TOKENS = 8_192
"""A longer limit on a response says what a client could take, and not what it expects."""

_FREE_TOOLS = frozenset(("web_fetch",))
_SEARCHES = frozenset(("web_search", "file_search"))


class UnboundedCallError(CallerError):
    """Nobody can say what a call costs at most, and its budget takes no other."""

    def __init__(self, model: str, problem: str) -> None:
        name = model[:MAX_MODEL_LENGTH]
        mode = 'its budget has reserve = "strict"'
        super().__init__(f"what a call to {name!r} can cost is not bounded: {problem} ({mode})")
        self.model = model
        self.problem = problem


def strict_bound(call: ModelCall, prices: PriceList, *, model: str | None = None) -> Cost:
    """Return what a call can cost at most; refuse one that nobody can bound.

    Raises `UnboundedCallError`, or `UnknownPriceError` for a model without a price.
    """
    name = call.model if model is None else model
    if not call.is_readable:
        raise UnboundedCallError(name, "its body is no JSON object")
    if call.miswritten_key:
        problem = f"its key {call.miswritten_key[:MAX_MODEL_LENGTH]!r} may be read in lower case"
        raise UnboundedCallError(name, problem)
    if call.is_surcharged:
        raise UnboundedCallError(name, 'there is no price for speed = "fast"')
    searches = _searches(call, name)
    window = prices.context_window(name)
    given = call.prompt_bytes + HIDDEN_TOKENS + IMAGE_TOKENS * call.images
    given += TOOL_TOKENS if call.has_tools else 0
    if call.has_open_input or call.server_tools:
        if window is None:
            problem = "it reads more than the request holds, and the model's window is not known"
            raise UnboundedCallError(name, problem)
        # After each use of a tool the model reads everything again.
        rounds = 1 + sum(searches.values())
        given = rounds * max(window, given)
    length = _longest(call, window)
    if length is None:
        problem = "it does not say how long the response may be; set max_tokens in the request"
        raise UnboundedCallError(name, problem)
    try:
        return prices.most(
            name,
            input_tokens=given,
            output_tokens=call.answers * length,
            service_tier=call.service_tier,
            is_cached_1h=call.is_message,
            web_searches=searches.get("web_search", 0),
            file_searches=searches.get("file_search", 0),
        )
    except InvalidAmountError as error:
        raise UnboundedCallError(name, str(error)) from None


def _longest(call: ModelCall, window: int | None) -> int | None:
    """Return how long one response may be: as the request says, or what the model can hold."""
    length = call.bound_tokens
    if length is None:
        return window
    # Thinking between calls of tools has a budget that the limit does not count.
    return length + call.thinking_tokens if call.thinking_tokens >= length else length


def _searches(call: ModelCall, model: str) -> dict[str, int]:
    """Return how often each tool of the provider may be used."""
    uses: dict[str, int] = {}
    for tool in call.server_tools:
        if tool.kind not in _SEARCHES and tool.kind not in _FREE_TOOLS:
            raise UnboundedCallError(model, f"there is no price for the tool {tool.kind!r}")
        most = call.max_tool_calls if tool.max_uses is None else tool.max_uses
        if most is None:
            problem = f"the tool {tool.kind!r} may be used without end; set max_uses for it"
            raise UnboundedCallError(model, problem)
        uses[tool.kind] = uses.get(tool.kind, 0) + most
    return uses


class _Ratio:
    """How many tokens the prompts of a model made of their bytes; what is older counts less."""

    __slots__ = ("chars", "tokens")

    def __init__(self, first: float) -> None:
        self.chars = _FIRST_CHARS
        self.tokens = _FIRST_CHARS * first

    def add(self, chars: int, tokens: int) -> None:
        if self.chars > _MOST_CHARS:
            self.chars /= 2
            self.tokens /= 2
        self.chars += chars
        self.tokens += tokens

    @property
    def value(self) -> float:
        return min(max(self.tokens / self.chars, _LEAST_RATIO), _MOST_RATIO)


_FIRST_CHARS = 4_000.0
_MOST_CHARS = 4e7
_LEAST_RATIO, _MOST_RATIO = 1 / 64, 2.0
MAX_PROJECTS_OF_MODEL = 100
"""Of how many projects it is known what a model makes of their prompts."""


class _Ratios:
    """The tokens in a byte of a prompt, for each model and project.

    No project says for another what its prompts make: one that has none yet begins with the median
    over all projects, among which the usual ratio counts as one.
    """

    def __init__(self) -> None:
        self._models: dict[str, dict[str, _Ratio]] = {}

    def get(self, model: str, project_id: str) -> float | None:
        """Return the tokens in a byte; None where nothing is known of the model."""
        known = self._models.get(model)
        if known is None:
            return None
        own = known.get(project_id)
        return self._first(known) if own is None else own.value

    def _first(self, known: dict[str, _Ratio]) -> float:
        return median([1 / CHARACTERS_PER_TOKEN, *(one.value for one in known.values())])

    def add(self, model: str, project_id: str, *, chars: int, tokens: int) -> None:
        """Learn from a prompt; the model and the project that nobody used for longest go first."""
        known = self._models.pop(model, None)
        if known is None:
            known = {}
            if len(self._models) >= MAX_MODELS_CACHED:
                del self._models[next(iter(self._models))]
        self._models[model] = known
        ratio = known.pop(project_id, None) or _Ratio(self._first(known))
        if len(known) >= MAX_PROJECTS_OF_MODEL:
            del known[next(iter(known))]
        known[project_id] = ratio
        ratio.add(chars, tokens)


def measured_chars(call: ModelCall) -> int:
    """Return how long a prompt is whose tokens say something of others; 0 if they do not.

    What lies with the provider, or is packed, has tokens and hardly any bytes here.
    """
    is_closed = not call.images and not call.has_open_input and not call.server_tools
    return call.prompt_chars if is_closed else 0


class CallEstimates:
    """What calls hold, learned from what responses report; bounded in projects and in models.

    `max_tokens` is how long a response is taken to be that neither its request nor experience
    bounds, and `default_micro_usd` what a call to a model without a price is taken to cost.

    `is_measured` is for calls of everybody: the tokens in a byte are learned for each model, the
    strict mode holds a `strict_bound`, and a long `max_tokens`, as coding agents send it with every
    question, does not stand in for an experience. Otherwise four bytes are a token, the strict mode
    holds all of the output that the request allows, and so does the other one at first.
    """

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        default_micro_usd: int | None = None,
        is_measured: bool = True,
    ) -> None:
        self._max_tokens = max_tokens
        self._default = estimates.configured(default_micro_usd)
        self._is_measured = is_measured
        self._lengths = estimates.Estimates()
        self._ratios = _Ratios()
        self._answers: dict[tuple[Kind, int], tuple[estimates.Estimate, estimates.Estimate]] = {}
        """What was learned of one response, and what that is for so many of them."""

    def hold(
        self,
        call: ModelCall,
        *,
        model: str,
        project_id: str,
        prices: PriceList,
        reserve: Reserve,
        whose: str | None = None,
    ) -> Hold:
        """Return what a call is to hold now; what was learned meanwhile counts.

        `whose` names those of whom one at a time may be a probe; it is the project unless said.
        A model without a price holds the default in dollars, or nothing: who limits dollars asks
        `prices.is_known` first.
        """
        own, kind = _kind(project_id, model)
        if whose is not None:
            kind = Kind(whose, model).text
        if reserve is Reserve.STRICT and self._is_measured:
            return self._strict(call, model, prices, kind)
        length = self._length(call, own, reserve)
        given = self.input_tokens(call, model, project_id)
        if length.basis is Basis.PROBE:
            # Nothing is known of the output; the input costs so much at least.
            least = _cost(prices, model, given, 0)
            probe = replace(length, amount=0 if least is None else least.micro_usd)
            tokens = replace(length, amount=given)
            return Hold(micro_usd=self._default or probe, tokens=tokens, kind=kind)
        lengths = (length.amount, length.most, length.likely)
        try:
            amount, most, likely = prices.plain_costs(
                model, input_tokens=given, output_tokens=lengths
            )
            usd = replace(length, amount=amount, most=most, likely=likely if length.likely else 0)
        except UnknownPriceError:
            usd = self._default or estimates.NOTHING
        tokens = replace(
            length,
            amount=given + length.amount,
            most=given + length.most,
            likely=given + length.likely if length.likely else 0,
        )
        return Hold(micro_usd=usd, tokens=tokens, kind=kind)

    def input_tokens(self, call: ModelCall, model: str, project_id: str) -> int:
        """Return how many tokens a prompt is taken to have, rounded up."""
        ratio = self._ratios.get(model, project_id)
        if ratio is None:
            return -(-call.prompt_chars // CHARACTERS_PER_TOKEN)
        return -int(-call.prompt_chars * ratio // 1)

    def learn(
        self, call: ModelCall, *, model: str, project_id: str, usage: ReportedUsage | CountedTokens
    ) -> int:
        """Learn how long responses of a model are in a project, and what its input makes.

        Return how long the prompt is that this was learned from, as `measured_chars` does.
        """
        chars = measured_chars(call)
        self.learn_of(
            model,
            project_id,
            chars=chars,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            answers=call.answers,
        )
        return chars

    def learn_of(
        self,
        model: str,
        project_id: str,
        *,
        chars: int,
        input_tokens: int,
        output_tokens: int,
        answers: int,
    ) -> None:
        """Learn from the responses to a request, and from its prompt if its size says something.

        A count that no prompt of that size can have is not taken.
        """
        # A provider has counted it, so that other projects may begin with it.
        length = max(-(-output_tokens // max(answers, 1)), 0)
        sample = estimates.Sample(tokens=length, is_done=True, is_priced=self._is_measured)
        self._lengths.feed(_kind(project_id, model)[0], sample)
        most = _MOST_RATIO * chars + HIDDEN_TOKENS
        if self._is_measured and chars and _LEAST_RATIO * chars <= input_tokens <= most:
            self._ratios.add(model, project_id, chars=chars, tokens=input_tokens)

    def _all_answers(
        self, answers: int, kind: Kind, learned: estimates.Estimate
    ) -> estimates.Estimate:
        """Return what is learned of one response for all responses to a request."""
        known = self._answers.get((kind, answers))
        if known is not None and known[0] is learned:
            return known[1]
        found = replace(
            learned,
            amount=answers * learned.amount,
            most=answers * learned.most,
            likely=answers * self._lengths.median(kind, Unit.TOKENS),
        )
        if len(self._answers) >= MAX_MODELS_CACHED:
            self._answers.clear()
        self._answers[kind, answers] = (learned, found)
        return found

    def _strict(self, call: ModelCall, model: str, prices: PriceList, kind: str) -> Hold:
        try:
            bound = strict_bound(call, prices, model=model)
        except UnknownPriceError:
            if self._default is None:
                raise
            given = call.prompt_bytes + call.output_tokens(self._max_tokens or 0)
            return Hold(micro_usd=self._default, tokens=estimates.given(given), kind=kind)
        return Hold(
            micro_usd=estimates.given(bound.micro_usd),
            tokens=estimates.given(bound.tokens),
            kind=kind,
        )

    def _length(self, call: ModelCall, kind: Kind, reserve: Reserve) -> estimates.Estimate:
        """Return how many tokens all responses to a request are taken to have."""
        most = None if call.max_tokens is None else call.answers * call.max_tokens
        if most is not None and (reserve is Reserve.STRICT or not most):
            return estimates.given(most)
        learned = self._lengths.estimate(kind, Unit.TOKENS, reserve=reserve)
        # A length that the request bounds needs no guess from few responses, unless it is long.
        is_open = most is None or (self._is_measured and most > call.answers * SHORT_TOKENS)
        is_learned = learned.basis is Basis.LEARNED
        if is_learned and (is_open or learned.samples >= FEW_SAMPLES):
            found = self._all_answers(call.answers, kind, learned)
            if most is None or found.amount < most:
                return found
        if most is None and self._max_tokens is not None:
            most = call.answers * self._max_tokens
            is_open = False
        return estimates.PROBE if most is None or is_open else estimates.given(most)


def _kind(project_id: str, model: str) -> tuple[Kind, str]:
    """Return the kind of work that calls of a model are in a project, and its text."""
    is_short = len(model) <= MAX_MODEL_LENGTH
    return _known_kind(project_id, model) if is_short else _new_kind(project_id, model)


def _new_kind(project_id: str, model: str) -> tuple[Kind, str]:
    kind = Kind(project_id, model)
    return kind, kind.text


_known_kind = lru_cache(maxsize=MAX_MODELS_CACHED)(_new_kind)


def _cost(prices: PriceList, model: str, given: int, made: int) -> Cost | None:
    try:
        return prices.cost(model, input_tokens=given, output_tokens=made)
    except UnknownPriceError:
        return None
