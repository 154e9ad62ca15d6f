"""From a step and what is known when it runs to a request: the work with everything filled in.

A request is what a backend carries out, and what a local one keeps as the input of its task.
Rule: a variable of the environment stays a named part of its text (`EnvPlaceholder`), so that no
value of one is ever stored; whoever carries out the request puts it in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from headgate.core.money import MICRO_PER_USD
from headgate.errors import InvalidSettingError
from headgate.executors.templates import Environment
from headgate.providers.http_headers import (
    FRAMING_HEADERS,
    HEADER_NAME,
    SECRET_NAME,
    check_header_value,
)
from headgate.workflow.backend import Amounts, StepOrder, StepTask
from headgate.workflow.conditions import holds
from headgate.workflow.config import PATHS
from headgate.workflow.costs import estimated
from headgate.workflow.expansion import ItemSource
from headgate.workflow.placeholders import (
    ONE_RUN_FIELDS,
    EnvPlaceholder,
    FilledBytes,
    FilledText,
    ItemPlaceholder,
    Text,
    UnfilledError,
    View,
    fill,
    fill_template,
    look_up,
    references,
    with_variables,
)
from headgate.workflow.progress import StepRunState, WorkflowProgress
from headgate.workflow.report import RunTotals
from headgate.workflow.run_folder import Run
from headgate.workflow.workflow import (
    CallWork,
    CommandWork,
    Endpoint,
    HttpWork,
    ModelWork,
    Step,
    StepItems,
    TargetWork,
    Work,
    Workflow,
    fields_of_steps,
    step_placeholders,
)


class CommandRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="command"):
    """A program to run; `cwd` begins at the folder of the workflow, which it is without one."""

    command: tuple[FilledText, ...]
    env: dict[str, FilledText] = {}
    pass_env: tuple[str, ...] = ()
    stdin: str | None = None
    cwd: FilledText | None = None


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="http"):
    """A request to send; without a body there is none, and `null` is one."""

    url: FilledText
    method: str
    headers: dict[str, FilledText] = {}
    body: Any = msgspec.UNSET


class CallRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="call"):
    """A Python function to call; without a value it is given none, and `null` is one."""

    entry_point: str
    given: Any = msgspec.UNSET


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="model"):
    """A call to a model; `body` is the whole request as the kind of the endpoint wants it."""

    endpoint: str
    model: str
    body: Any
    max_tokens: int


class TargetRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="target"):
    """A task for a target that a configuration names, with the fields of a submission."""

    target: str | None = None
    action: str | None = None
    params: Any = None
    input: Any = None
    tab_id: str | None = None
    selector: str | None = None
    ref: str | None = None
    slot: str | None = None
    provider: str | None = None


Request = CommandRequest | HttpRequest | CallRequest | ModelRequest | TargetRequest

_encoder = msgspec.json.Encoder()
_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


def encoded(request: Request) -> msgspec.Raw:
    """Write a request as JSON that `decoded` reads."""
    return msgspec.Raw(_encoder.encode(request))


def decoded(raw: bytes | msgspec.Raw) -> Request:
    """Read what `encoded` wrote."""
    return _requests.decode(raw)


def request_of(work: Work, view: View, filled_bytes: FilledBytes | None = None) -> Request:
    """Fill the work of a step; `UnfilledError` says which placeholder could not be filled.

    `filled_bytes` counts what is filled in, and has its limit.
    """
    filled_bytes = filled_bytes or FilledBytes()
    match work:
        case CommandWork():
            return _command(work, view, filled_bytes)
        case HttpWork():
            return _http(work, view, filled_bytes)
        case CallWork(entry_point=entry_point, given=given):
            value = msgspec.UNSET if given is None else fill_template(given, view, filled_bytes)
            return CallRequest(entry_point=entry_point, given=value)
        case ModelWork(endpoint=endpoint, model=model, max_tokens=max_tokens):
            body = fill_template(work.body, view, filled_bytes)
            return ModelRequest(endpoint=endpoint, model=model, body=body, max_tokens=max_tokens)
        case TargetWork():
            return _target(work, view, filled_bytes)


def _command(work: CommandWork, view: View, filled_bytes: FilledBytes) -> CommandRequest:
    return CommandRequest(
        command=tuple([fill(argument, view, filled_bytes) for argument in work.command]),
        env=_texts(work.env, view, filled_bytes),
        pass_env=work.pass_env,
        stdin=_plain(work.stdin, view, filled_bytes),
        cwd=None if work.cwd is None else fill(work.cwd, view, filled_bytes),
    )


def _http(work: HttpWork, view: View, filled_bytes: FilledBytes) -> HttpRequest:
    return HttpRequest(
        url=fill(work.url, view, filled_bytes),
        method=work.method,
        headers=_texts(work.headers, view, filled_bytes),
        body=msgspec.UNSET if work.body is None else fill_template(work.body, view, filled_bytes),
    )


def _target(work: TargetWork, view: View, filled_bytes: FilledBytes) -> TargetRequest:
    return TargetRequest(
        target=work.target,
        action=_plain(work.action, view, filled_bytes),
        params=None if work.params is None else fill_template(work.params, view, filled_bytes),
        input=None if work.input is None else fill_template(work.input, view, filled_bytes),
        tab_id=_plain(work.tab_id, view, filled_bytes),
        selector=_plain(work.selector, view, filled_bytes),
        ref=_plain(work.ref, view, filled_bytes),
        slot=work.slot,
        provider=work.provider,
    )


def _texts(
    texts: Mapping[str, Text], view: View, filled_bytes: FilledBytes
) -> dict[str, FilledText]:
    return {name: fill(text, view, filled_bytes) for name, text in texts.items()}


def _plain(text: Text | None, view: View, filled_bytes: FilledBytes) -> str | None:
    """Fill a text that has no variables in it: the file was refused otherwise."""
    if text is None:
        return None
    filled = fill(text, view, filled_bytes)
    return filled if isinstance(filled, str) else "".join(map(str, filled))


# The useful part of a result: what `steps.ID.output` stands for, by the kind of the step's work.
#
# A result has everything that the work gave. Its output is what the next step mostly wants: of a
# command its standard output, of a model the text of its answer.


def result_value(raw: bytes | msgspec.Raw | None) -> Any:  # noqa: ANN401
    """Return a result that was kept, as JSON values; one that cannot be read is its text.

    What a step gave never ends a run: a service may have taken what nobody here can read.
    """
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return {"text": bytes(raw).decode(errors="replace")}


def output_of(work: Work, result: Any) -> Any:  # noqa: ANN401
    """Return the output in a result, as JSON values; what is not of the usual form is it all."""
    match work:
        case CommandWork():
            return _of_command(result)
        case HttpWork():
            return body_of(result)
        case ModelWork():
            return _of_model(result)
        case _:
            return result


def _of_command(result: Any) -> Any:  # noqa: ANN401
    if not isinstance(result, dict):
        return result
    if "json" in result:
        return result["json"]
    if "stdout" not in result:
        return body_of(result)
    stdout = result["stdout"]
    return stdout.removesuffix("\n").removesuffix("\r") if isinstance(stdout, str) else stdout


def body_of(result: Any) -> Any:  # noqa: ANN401
    """Return the body of an answer in a result: JSON values, or its text."""
    # A body that is no JSON is kept as an object with nothing but the text in it.
    if isinstance(result, dict) and result.keys() == {"text"}:
        return result["text"]
    return result


def has_answer(result: Any) -> bool:  # noqa: ANN401
    """Tell whether a result is the answer of a model; one that calls a tool may have no text."""
    match result:
        case {"choices": [{"message": {}}, *_]} | {"content": list()}:
            return True
        case _:
            return False


def is_truncated(result: Any) -> bool:  # noqa: ANN401
    """Tell whether the answer of a model ends where its limit of tokens was reached."""
    match result:
        case {"choices": list(choices)}:
            return any(
                isinstance(one, dict) and one.get("finish_reason") == "length" for one in choices
            )
        case {"stop_reason": "max_tokens"}:
            return True
        case {"incomplete_details": {"reason": "max_output_tokens"}}:
            return True
        case _:
            return False


def _of_model(result: Any) -> Any:  # noqa: ANN401
    match result:
        case {"choices": [{"message": {"content": content}}, *_]}:
            return _text(content)
        case {"content": list(content)}:
            return _text(content)
        case _:
            return body_of(result)


def _text(content: Any) -> Any:  # noqa: ANN401
    """Return the text of an answer; parts that are no text, such as calls of tools, have none."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join([text for text in texts if isinstance(text, str)])


# What the texts and conditions of a step are filled with, when its turn has come.
#
# A result is fetched when a text needs it, and some are kept for the next text that does. Rule:
# what is kept is bounded in bytes; the memory of a run does not grow with what its steps give.

MAX_CACHE_BYTES = 32 << 20
FETCHED_AT_ONCE = 64

Results = Callable[[Sequence[StepTask]], Awaitable[list[Any]]]
_Key = tuple[str, str | int]
"""A field of a run by its number, or of all runs by the id of their step."""

_T = TypeVar("_T")
_OF_ONE = frozenset(("output", "result"))
_OF_ALL = {"outputs": "output", "results": "result"}
_OF_RESULTS = _OF_ONE.union(_OF_ALL)


class RunView:
    """What one run of a step sees of the others; results are those that were fetched for it."""

    def __init__(self, filler: Filler, number: int, values: Mapping[_Key, Any]) -> None:
        self._filler = filler
        self._number = number
        self._values = values

    @cached_property
    def step(self) -> Step:
        """The step that runs."""
        return self._filler.progress.step(self._number)

    @cached_property
    def index(self) -> int:
        """The number of the item."""
        return self._filler.progress.index(self._number)

    @cached_property
    def item(self) -> Any:  # noqa: ANN401
        """The item; None where there is none."""
        source = self._filler.items.get(self.step.id)
        return None if source is None else source.item(self.index)

    @property
    def run(self) -> dict[str, str]:
        """The id and the name of the run."""
        return self._filler.named

    def field(self, step: str, name: str) -> Any:  # noqa: ANN401
        """Return a field of another step that has ended."""
        number = self._filler.seen_run(self.step, self.index, step)
        if name in _OF_ALL:
            return self._values.get((name, step))
        if name in _OF_ONE:
            return None if number is None else self._values.get((name, number))
        if number is None or name not in ONE_RUN_FIELDS:
            return self._filler.field_of_all(step, name)
        return self._filler.field_of_one(number, name)


class Filler:
    """Makes views for runs of steps, with the results that they refer to."""

    def __init__(
        self,
        run: Run,
        progress: WorkflowProgress,
        tally: RunTotals,
        results: Results,
    ) -> None:
        workflow = run.workflow
        self.progress = progress
        self.items = run.items
        self.named = {"id": run.id, "name": workflow.name}
        self._tally = tally
        self._results = results
        self._steps = {step.id: step for step in workflow.steps}
        self._needs = {
            step.id: tuple(one for one in fields_of_steps(step) if one[1] in _OF_RESULTS)
            for step in workflow.steps
        }
        self._sources = {step.id: tuple(self._counterparts(step)) for step in workflow.steps}
        self._cache = _Cache(MAX_CACHE_BYTES)

    def needs_results(self, number: int) -> bool:
        """Tell whether a run refers to the results of others, which have to be fetched."""
        return bool(self._needs[self.progress.step(number).id])

    def view(self, number: int, values: Mapping[_Key, Any] | None = None) -> RunView:
        """Return what a run sees, with the values that `fetch` gave for it."""
        return RunView(self, number, values or {})

    async def fetch(self, numbers: Sequence[int]) -> dict[_Key, Any]:
        """Fetch the results that the texts and conditions of these runs refer to."""
        values: dict[_Key, Any] = {}
        wanted: dict[_Key, str] = {}
        for number in numbers:
            step, index = self.progress.step(number), self.progress.index(number)
            for parent, field in self._needs[step.id]:
                if field in _OF_ALL:
                    values[field, parent] = await self._of_all(parent, field)
                elif (seen := self.seen_run(step, index, parent)) is not None:
                    self._look_up((field, seen), parent, values, wanted)
        for some in _pieces(list(wanted)):
            found = await self._fetched([int(number) for _, number in some])
            for key, result in zip(some, found, strict=True):
                values[key] = self._value(wanted[key], key[0], result)
                self._cache.put(key, values[key])
        return values

    def seen_run(self, step: Step, index: int, other: str) -> int | None:
        """Return the one run of another step that a step sees; None if it sees all of them."""
        runs = self.progress.runs(other)
        if other in self._sources[step.id]:
            return runs[index]
        return runs[0] if self._steps[other].foreach is None else None

    def field_of_one(self, number: int, name: str) -> Any:  # noqa: ANN401
        """Return what is known of one run without its result."""
        if name == "status":
            return _status(self.progress.run_state(number))
        if name == "error":
            return self._tally.error(number)
        if name == "cost_usd":
            return self._tally.micro_usd(number) / MICRO_PER_USD
        return None

    def field_of_all(self, step: str, name: str) -> Any:  # noqa: ANN401
        """Return what is known of all runs of a step without their results."""
        counts = self.progress.counts(step)
        if name == "status":
            return self.progress.status(step)
        if name == "cost_usd":
            return self._tally.step_micro_usd(step) / MICRO_PER_USD
        if name == "skipped":
            return counts.skipped
        return counts[StepRunState[name.upper()]] if name in ("done", "failed") else None

    def _look_up(
        self, key: _Key, step: str, values: dict[_Key, Any], wanted: dict[_Key, str]
    ) -> None:
        """Put a value among those that are known, or among those that are to be fetched."""
        if self.progress.run_state(int(key[1])) is not StepRunState.DONE:
            values[key] = None
        elif key in self._cache:
            values[key] = self._cache.get(key)
        else:
            wanted[key] = step

    async def _of_all(self, step: str, field: str) -> list[Any]:
        if (field, step) in self._cache:
            kept: list[Any] = self._cache.get((field, step))
            return kept
        runs = self.progress.runs(step)
        values: list[Any] = [None] * len(runs)
        done = [number for number in runs if self.progress.run_state(number) is StepRunState.DONE]
        for some in _pieces(done):
            for number, result in zip(some, await self._fetched(some), strict=True):
                values[number - runs.start] = self._value(step, _OF_ALL[field], result)
        self._cache.put((field, step), values)
        return values

    async def _fetched(self, numbers: Sequence[int]) -> list[Any]:
        return await self._results([self._tally.kept_task(number) for number in numbers])

    def _value(self, step: str, field: str, result: Any) -> Any:  # noqa: ANN401
        return result if field == "result" else output_of(self._steps[step].work, result)

    def _counterparts(self, step: Step) -> Iterator[str]:
        while isinstance(step.foreach, StepItems):
            yield step.foreach.step
            step = self._steps[step.foreach.step]


class _Cache:
    """The values that were used last, as many as fit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: OrderedDict[_Key, tuple[Any, int]] = OrderedDict()

    def __contains__(self, key: _Key) -> bool:
        return key in self._values

    def get(self, key: _Key) -> Any:  # noqa: ANN401
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: _Key, value: Any) -> None:  # noqa: ANN401
        size = len(_encoder.encode(value))
        self._values[key] = (value, size)
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, (_, freed) = self._values.popitem(last=False)
            self._bytes -= freed


def fields_read(workflow: Workflow) -> frozenset[tuple[str, str]]:
    """Return the fields of steps that some step refers to, by id and name."""
    return frozenset(field for step in workflow.steps for field in fields_of_steps(step))


# Placeholders of items that an item has nothing for: known before anything runs or costs.

MAX_ITEMS_CHECKED = 10_000


class Unfillable(NamedTuple):
    """A step of whose runs some will fail, because their items lack what its texts name."""

    step: str
    runs: int
    error: str


def unfillable_steps(workflow: Workflow, items: Mapping[str, ItemSource]) -> Iterator[Unfillable]:
    """Give the steps of which runs would fail for their items; the first items are looked at.

    A step with a condition may skip just those, so it is left out.
    """
    for step in workflow.steps:
        wanted = {
            placeholder
            for placeholder in step_placeholders(step)
            if isinstance(placeholder, ItemPlaceholder) and placeholder.path
        }
        if not wanted or step.when is not None:
            continue
        source, errors = items[step.id], []
        for index in range(min(source.count, MAX_ITEMS_CHECKED)):
            try:
                for placeholder in wanted:
                    look_up(placeholder, _ItemView(source.item(index), index))
            except UnfilledError as error:
                errors.append(str(error))
        if errors:
            yield Unfillable(step.id, len(errors), errors[0])


class _ItemView:
    """What is known of a run before any other: its item."""

    def __init__(self, item: Any, index: int) -> None:  # noqa: ANN401
        self.item = item
        self.index = index
        self.run: dict[str, str] = {}

    def field(self, step: str, name: str) -> Any:  # noqa: ANN401, ARG002
        return None


def _pieces(values: list[_T]) -> Iterator[list[_T]]:
    for start in range(0, len(values), FETCHED_AT_ONCE):
        yield values[start : start + FETCHED_AT_ONCE]


def _status(run_state: StepRunState) -> str:
    if run_state.is_not_run:
        return "not run"
    return "skipped" if run_state.is_skipped else run_state.name.lower()


# A run of a step whose turn has come: an order for the backend, or a reason why there is none.
#
# The condition is asked first, then the budgets that refused something, then the texts are
# filled. Rule: nothing that a step says can stop the run of the workflow. A text that cannot be
# filled is the failure of that one run, in a line that says what is missing.

MAX_REFUSALS = 64
MAX_RUN_FILLED_BYTES = 16 << 30
"""How much all texts of one run may be filled to: a million runs of a step of 16 KiB each."""


class NoOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A run that ends without a task; `error` if it failed."""

    run_state: StepRunState
    error: str = ""


class RefusedAmounts:
    """What budgets would not hold: an amount that is as large in every way is not asked for.

    A refusal may be about dollars or about tokens; what is smaller in one of them may pass. What
    nobody knows is the same for all runs of a step, and says nothing of another step.
    """

    def __init__(self) -> None:
        self._smallest: dict[tuple[str, bool, bool], list[tuple[int, int]]] = {}

    def add(self, step_id: str, amounts: Amounts) -> None:
        """Keep what was refused. Those that are too many are asked for again, which is safe."""
        if not self.cover(step_id, amounts):
            known = self._smallest.setdefault(_known_alike(step_id, amounts), [])
            if len(known) < MAX_REFUSALS:
                known.append((amounts[0] or 0, amounts[1] or 0))

    def cover(self, step_id: str, amounts: Amounts) -> bool:
        """Tell whether a run of a step would be refused again."""
        micro_usd, tokens = amounts[0] or 0, amounts[1] or 0
        refused = self._smallest.get(_known_alike(step_id, amounts), ())
        return any(micro_usd >= dollars and tokens >= count for dollars, count in refused)


def _known_alike(step_id: str, amounts: Amounts) -> tuple[str, bool, bool]:
    """Return what amounts have in common that can be compared."""
    has_usd, has_tokens = amounts[0] is not None, amounts[1] is not None
    return "" if has_usd and has_tokens else step_id, has_usd, has_tokens


class OrderMaker:
    """Makes the orders of one run of a workflow."""

    def __init__(
        self,
        workflow: Workflow,
        filler: Filler,
        refusals: RefusedAmounts,
        progress: WorkflowProgress,
        *,
        is_limited: bool = True,
    ) -> None:
        self._workflow = workflow
        self._is_limited = is_limited
        self._filler = filler
        self._refusals = refusals
        self._progress = progress
        self._provisional: set[str] = set()
        self._same: dict[str, Amounts] = {}
        self._filled_bytes = 0

    def made(self, number: int, generation: int, values: Mapping[Any, Any]) -> StepOrder | NoOrder:
        """Return the order of a run, or how it ends without one."""
        view = self._filler.view(number, values)
        step = view.step
        if step.when is not None and not holds(step.when, view):
            return NoOrder(run_state=StepRunState.CONDITION_FALSE)
        if step.id in self._same and self._refusals.cover(step.id, self._same[step.id]):
            return NoOrder(run_state=StepRunState.OVER_BUDGET)
        try:
            return self._order(number, generation, step, view)
        except UnfilledError as error:
            return NoOrder(run_state=StepRunState.FAILED, error=str(error))

    def _order(
        self, number: int, generation: int, step: Step, view: RunView
    ) -> StepOrder | NoOrder:
        request = self._request(step, view)
        amounts = self._same.get(step.id)
        if amounts is None:
            amounts = estimated(self._workflow, step, request, is_limited=self._is_limited)
            # Only what a model is asked makes a difference from run to run.
            if step.cost_micro_usd is not None or not isinstance(step.work, ModelWork):
                self._same[step.id] = amounts
        if self._refusals.cover(step.id, amounts):
            return NoOrder(run_state=StepRunState.OVER_BUDGET)
        return StepOrder(
            number=number,
            index=view.index,
            generation=generation,
            step=step,
            request=request,
            micro_usd=amounts[0],
            tokens=amounts[1],
            is_provisional=self._is_provisional(number, step),
        )

    def _request(self, step: Step, view: RunView) -> Request:
        filled_bytes = FilledBytes()
        request = request_of(step.work, view, filled_bytes)
        self._filled_bytes += filled_bytes.count
        if self._filled_bytes > MAX_RUN_FILLED_BYTES:
            problem = f"the run is filled to more than {MAX_RUN_FILLED_BYTES:,} bytes; split it"
            raise UnfilledError(problem)
        return request

    def _is_provisional(self, number: int, step: Step) -> bool:
        """Tell whether what a run builds upon may be begun anew by a resume."""
        if self._progress.goes_without(number) or not self._provisional.isdisjoint(step.depends_on):
            self._provisional.add(step.id)
            return True
        return False


# Variables of the environment in the texts of a workflow: looked up when work is carried out.
#
# Rule: a value that was given out is taken out again of everything that becomes an error, so that
# it is never kept; a variable that is missing is named.


class Variables:
    """The environment of a run, as its steps may see it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self._environment = Environment(environ)

    def __repr__(self) -> str:
        return f"Variables({self._environment!r})"

    def filled(self, text: FilledText, setting: str) -> str:
        """Put variables into a text, or raise `InvalidSettingError` for one that is not set."""
        return with_variables(text, partial(self._value, setting))

    def fixed(self, text: Text, setting: str) -> str | None:
        """Return a text as it is in every run of its step; None if it depends on more."""
        if any(not isinstance(placeholder, EnvPlaceholder) for placeholder in references(text)):
            return None
        return "".join(
            [self._value(setting, part) if isinstance(part, EnvPlaceholder) else str(part)
             for part in text.parts]
        )  # fmt: skip

    def check(self, text: Text, setting: str) -> None:
        """Raise `InvalidSettingError` for a variable of a text that is not set."""
        for placeholder in references(text):
            if isinstance(placeholder, EnvPlaceholder):
                self._value(setting, placeholder)

    def cleaned(self, text: str) -> str:
        """Return a text without the values that were given out."""
        return self._environment.cleaned(text)

    @property
    def longest_bytes(self) -> int:
        """How long a value that was given out can be, in whatever way it is written."""
        return self._environment.longest_bytes

    def cleaned_end(self, raw: bytes, length: int) -> str:
        """Return the end of a text without the values that were given out, or any part of one."""
        return self._environment.cleaned_end(raw, length)

    def hide(self, value: str, shown: str) -> None:
        """Remember a secret that came with no variable."""
        self._environment.hide(value, shown)

    def _value(self, setting: str, placeholder: EnvPlaceholder) -> str:
        if placeholder.default is not None and not self.environ.get(placeholder.name):
            return placeholder.default
        return self._environment.value(placeholder.name, setting=setting)


# Where requests of steps go, and with which headers: filled from variables, keys among them.
#
# Rule: errors name a header or a variable, and never its value.

ANTHROPIC_VERSION = "2023-06-01"


def model_url(endpoint: Endpoint, variables: Variables) -> str:
    """Return where the models of an endpoint are asked."""
    setting = f"config.endpoints.{endpoint.name}.url"
    base = variables.fixed(endpoint.url, setting) or ""
    return base.rstrip("/") + PATHS[endpoint.kind]


def model_headers(endpoint: Endpoint, variables: Variables) -> dict[str, str]:
    """Return the headers that an endpoint wants, the key among them."""
    setting = f"config.endpoints.{endpoint.name}"
    texts = {name: text.parts for name, text in endpoint.headers.items()}
    headers = {"anthropic-version": ANTHROPIC_VERSION} if endpoint.kind == "anthropic" else {}
    headers |= filled_headers(texts, f"{setting}.headers", variables)  # type: ignore[arg-type]
    if endpoint.key is None:
        return headers
    key = variables.fixed(endpoint.key, f"{setting}.key") or ""
    check_header_value(key, f"{setting}.key")
    variables.hide(key, "{key}")
    own = {"x-api-key": key} if endpoint.kind == "anthropic" else {"authorization": f"Bearer {key}"}
    return own | headers


def filled_headers(
    headers: Mapping[str, FilledText], setting: str, variables: Variables
) -> dict[str, str]:
    """Return headers as they are sent; errors name the header, and never its value."""
    filled: dict[str, str] = {}
    for name, text in headers.items():
        check_header_name(name, f"{setting}.{name}")
        value = filled[name.lower()] = variables.filled(text, f"{setting}.{name}")
        check_header_value(value, f"{setting}.{name}")
        if SECRET_NAME.search(name):
            variables.hide(value.rpartition(" ")[2], f"{{{name}}}")
    return filled


def check_header_name(name: str, setting: str) -> None:
    """Refuse a header that cannot be written, or that frames the request."""
    if not HEADER_NAME.fullmatch(name):
        raise InvalidSettingError(setting, "is not the name of a header")
    if name.lower() in FRAMING_HEADERS:
        raise InvalidSettingError(setting, "is set for every request; leave it out")
