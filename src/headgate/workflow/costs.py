"""What a run of a step is expected to cost at most, before it runs.

`cost_usd` and `estimate` say it themselves; a call to a model is measured as it will be sent, and
priced. Everything else costs nothing that is known here.

What steps have cost is kept from run to run, for those of which nobody says it.

Rule: where dollars are limited, a call whose price nobody knows is refused before the run, because
it could not be held. Where they are not, it is made, and its tokens are counted.
"""

from __future__ import annotations

import fcntl
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from headgate.config import load_prices
from headgate.core.estimates import MAX_KINDS, Kind
from headgate.errors import InvalidAmountError, WorkflowError
from headgate.executors.targets import is_free_program
from headgate.providers.prices import CHARACTERS_PER_TOKEN, UnknownPriceError, price_advice
from headgate.providers.requests import ModelCall, read_call
from headgate.storage.usage import KnownKind
from headgate.workflow.config import PATHS
from headgate.workflow.placeholders import Text, UnfilledError
from headgate.workflow.run_folder import replace_file
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
    where = "to the settings, or config.prices to the file, or give the step an estimate with usd"
    return error.with_advice(f"{price_advice(error.model)} {where}")


def _tokens(call: ModelCall, work: ModelWork) -> int:
    prompt_tokens = -(-call.prompt_chars // CHARACTERS_PER_TOKEN)
    return prompt_tokens + call.output_tokens(work.max_tokens)


# What the steps of workflows have cost, kept from run to run: one file for a data directory.
#
# A new run begins with what is known of its workflow, and writes it back with what it has learned
# when it ends or is stopped; a resume goes by the store of the run. Rule: the file is a help and
# never a condition. Without it, or where it cannot be used, a run learns anew.

ESTIMATES_FILE = "estimates.json"
_LOCK_FILE = "estimates.lock"
MAX_KEPT_KINDS = 10 * MAX_KINDS
"""How many kinds of work are kept for all workflows together; the one fed longest ago goes."""
_MOST_BYTES = 64 * 1024 * 1024


class _KeptKinds(msgspec.Struct, frozen=True):
    kinds: list[KnownKind]


_kept_kinds = msgspec.json.Decoder(_KeptKinds)


def earlier_kinds(data: Path, workflow: str) -> list[KnownKind]:
    """Return what is known of the steps of a workflow from earlier runs."""
    path = data / ESTIMATES_FILE
    try:
        return [one for one in _read_kinds(path) if one.kind.project_id == workflow]
    except _UNREADABLE as error:
        line = f"{path} cannot be used: {_problem(error)}; what earlier runs have cost is not known"
        warnings.warn(line, stacklevel=1)
        return []


def write_kinds(data: Path, kinds: Sequence[KnownKind]) -> None:
    """Keep what is known of the steps of a workflow; of each kind, what was fed last."""
    path = data / ESTIMATES_FILE
    known: dict[Kind, KnownKind] = {}
    try:
        with _locked(data / _LOCK_FILE):
            # What cannot be read was told of when the run began, and is replaced.
            with suppress(*_UNREADABLE):
                known = {one.kind: one for one in _read_kinds(path)}
            for one in kinds:
                if one.kind not in known or known[one.kind].fed_at <= one.fed_at:
                    known[one.kind] = one
            replace_file(path, msgspec.json.encode(_KeptKinds(_newest(list(known.values())))))
    except OSError as error:
        line = f"{path} cannot be written: {_problem(error)}; the next run learns anew what its"
        warnings.warn(f"{line} steps cost", stacklevel=1)


_UNREADABLE = (OSError, msgspec.MsgspecError, UnicodeDecodeError)


def _problem(error: Exception) -> str:
    return (error.strerror or "") if isinstance(error, OSError) else str(error)


def _read_kinds(path: Path) -> list[KnownKind]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise msgspec.ValidationError("it is too long")
        return _kept_kinds.decode(path.read_bytes()).kinds
    except FileNotFoundError:
        return []


def _newest(kinds: Sequence[KnownKind]) -> list[KnownKind]:
    """Return the kinds that are kept, those that were fed longest ago first."""
    kept: list[KnownKind] = []
    counts: Counter[str] = Counter()
    for one in sorted(kinds, key=attrgetter("fed_at"), reverse=True)[:MAX_KEPT_KINDS]:
        counts[one.kind.project_id] += 1
        if counts[one.kind.project_id] <= MAX_KINDS:
            kept.append(one)
    return kept[::-1]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Let one process at a time change the estimates; the lock ends with the process.

    It has a file of its own: a service holds the directory for as long as it runs.
    """
    opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)
