"""What a run of a step is expected to cost at most, before it runs.

`cost_usd` and `estimate` say it themselves; a call to a model is measured as it will be sent, and
priced. Everything else costs nothing that is known here.

Rule: where dollars are limited, a call whose price nobody knows is refused before the run, because
it could not be held. Where they are not, it is made, and its tokens are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headgate.config import load_prices
from headgate.errors import InvalidAmountError, WorkflowError
from headgate.executors.targets import is_free_program
from headgate.providers.prices import CHARACTERS_PER_TOKEN, UnknownPriceError
from headgate.providers.requests import ModelCall, read_call
from headgate.workflow.config import PATHS
from headgate.workflow.placeholders import Text, UnfilledError
from headgate.workflow.run_record import RunScope
from headgate.workflow.workflow import CommandWork, Estimate, ModelWork, Step, Workflow

_NOTHING = Estimate()


def estimated(
    workflow: Workflow,
    step: Step,
    request: Any,  # noqa: ANN401
    *,
    is_limited: bool = True,
) -> tuple[int | None, int | None]:
    """Return the micro-dollars and the tokens of a filled request; one to a model has a `body`.

    None is what nobody knows, and what is learned from run to run.

    Raises `UnfilledError` for a model whose name was filled in and which has no price, where
    dollars are limited.
    """
    said = step.estimate or _NOTHING
    micro_usd = said.micro_usd if step.cost_micro_usd is None else step.cost_micro_usd
    if not isinstance(step.work, ModelWork):
        program = request.command[0] if isinstance(step.work, CommandWork) else None
        if isinstance(program, str) and is_free_program(program):
            return micro_usd or 0, said.tokens or 0
        return micro_usd, said.tokens
    path = PATHS[workflow.endpoints[step.work.endpoint].kind]
    call = read_call(path, msgspec.json.encode(request.body))
    if micro_usd is None:
        micro_usd = _price(workflow, call, step.work, is_limited=is_limited)
    tokens = _tokens(call, step.work) if said.tokens is None else said.tokens
    return micro_usd, tokens


def with_settings_prices(workflow: Workflow, path: Path | None) -> Workflow:
    """Return a workflow that knows the prices of a settings file; its own say more than those."""
    prices = {} if path is None else load_prices(path)
    return msgspec.structs.replace(workflow, prices=prices | workflow.prices)


def check_prices(workflow: Workflow, scopes: Sequence[RunScope]) -> None:
    """Raise `WorkflowError` for a call to a model that has no price and no estimate.

    A model whose name is filled in is known when it runs, and not before. A run whose budgets limit
    no dollars needs no prices.
    """
    if not limits_dollars(scopes):
        return
    known: set[str] = set()
    for position, step in enumerate(workflow.steps):
        if not isinstance(step.work, ModelWork) or _is_said(step):
            continue
        model = step.work.body.value["model"]
        if not isinstance(model, Text) and model not in known:
            _check_price(workflow, step, position)
            known.add(model)


def _check_price(workflow: Workflow, step: Step, position: int) -> None:
    model = step.work.model if isinstance(step.work, ModelWork) else ""
    try:
        workflow.price_list.cost(model, input_tokens=1, output_tokens=1)
    except UnknownPriceError as error:
        key = f"steps[{position}].model"
        raise WorkflowError(workflow.file, _unknown(error), line=step.line, key=key) from None


def _is_said(step: Step) -> bool:
    is_estimated = step.estimate is not None and step.estimate.micro_usd is not None
    return is_estimated or step.cost_micro_usd is not None


def limits_dollars(scopes: Sequence[RunScope]) -> bool:
    """Tell whether dollars are limited, as far as the run knows; what others share may be."""
    return len(scopes) > 1 or any(one.micro_usd is not None for one in scopes)


def _price(workflow: Workflow, call: ModelCall, work: ModelWork, *, is_limited: bool) -> int | None:
    most = call.output_tokens(work.max_tokens)
    prices = workflow.price_list
    try:
        cost = prices.estimate(call.model, prompt_chars=call.prompt_chars, max_tokens=most)
    except UnknownPriceError as error:
        if not is_limited:
            return None
        raise UnfilledError(_unknown(error)) from None
    except InvalidAmountError as error:
        raise UnfilledError(str(error)) from None
    return cost.micro_usd


def _unknown(error: UnknownPriceError) -> str:
    advice = "to the settings, or config.prices to the file, or give the step an estimate with usd"
    return f"{str(error).rpartition(',')[0]} {advice}"


def _tokens(call: ModelCall, work: ModelWork) -> int:
    prompt_tokens = -(-call.prompt_chars // CHARACTERS_PER_TOKEN)
    return prompt_tokens + call.output_tokens(work.max_tokens)
