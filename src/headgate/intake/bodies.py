"""The JSON of a submission as it comes in: its fields, and what is wrong where it does not fit.

Fields that nobody knows are ignored, as clients of other versions may send them. One that looks
like a known field is refused instead: a task whose `dedline` is ignored would run for too long.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any, TypeVar

import msgspec

from headgate.core.tasks.records import OnExhausted, OnParentFailure
from headgate.errors import InvalidTaskError

MAX_FIELDS = 64
_SIMILAR = 0.8
_SHOWN_CHARACTERS = 60
_MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`")
_TOKEN = re.compile(r"hg_[0-9a-f]{12}_[0-9a-f]+")
_UNKNOWN_FIELD = "Object contains unknown field"


class EstimateBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a task is expected to use."""

    tokens: int | None = None
    usd: int | float | str | None = None


class TaskBody(msgspec.Struct, rename="camel"):
    """One task as a client writes it. Nothing is required here; what is missing is judged later.

    `params` and `input` are kept unread. They are not optional types, because the decoder reads
    nothing but null into an optional raw value; empty is absent.
    """

    agent_id: str | None = None
    action: str | None = None
    tab_id: str | None = None
    selector: str | None = None
    ref: str | None = None
    params: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    priority: int | None = None
    deadline: str | None = None
    callback_url: str | None = None
    project_id: str | None = None
    target: str | None = None
    slot: str | None = None
    provider: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    weight: float | None = None
    estimate: EstimateBody | None = None
    cost_usd: int | float | str | None = None
    scopes: list[str] | None = None
    depends_on: list[str] | None = None
    on_parent_failure: OnParentFailure | None = None
    not_before: str | None = None
    labels: dict[str, str] | None = None
    max_attempts: int | None = None
    timeout_seconds: float | None = None
    on_exhausted: OnExhausted | None = None


class BatchBody(msgspec.Struct, rename="camel"):
    """Several tasks, with what they share."""

    agent_id: str | None = None
    callback_url: str | None = None
    project_id: str | None = None
    tasks: list[msgspec.Raw] | None = None


class _StrictTaskBody(TaskBody, rename="camel", forbid_unknown_fields=True):
    pass


class _StrictBatchBody(BatchBody, rename="camel", forbid_unknown_fields=True):
    pass


Body = TypeVar("Body", bound=msgspec.Struct)
Small = TypeVar("Small", bound=msgspec.Struct)

TASK_FIELDS = tuple(field.encode_name for field in msgspec.structs.fields(TaskBody))
BATCH_FIELDS = tuple(field.encode_name for field in msgspec.structs.fields(BatchBody))
_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BodyReader:
    """Decodes bodies; the strict decoder is tried first because it costs nothing extra."""

    def __init__(self) -> None:
        self._strict_task = msgspec.json.Decoder(_StrictTaskBody)
        self._task = msgspec.json.Decoder(TaskBody)
        self._strict_batch = msgspec.json.Decoder(_StrictBatchBody)
        self._batch = msgspec.json.Decoder(BatchBody)

    def task(self, body: bytes | msgspec.Raw) -> TaskBody:
        """Read one task, or raise `InvalidTaskError`."""
        try:
            return self._strict_task.decode(body)
        except (ValueError, RecursionError) as error:
            if not str(error).startswith(_UNKNOWN_FIELD):
                raise _refusal(error) from None
        return _lenient(self._task, body, TASK_FIELDS)

    def batch(self, body: bytes) -> BatchBody:
        """Read a batch whose tasks are still unread, or raise `InvalidTaskError`."""
        try:
            return self._strict_batch.decode(body)
        except (ValueError, RecursionError) as error:
            if not str(error).startswith(_UNKNOWN_FIELD):
                raise _refusal(error) from None
        return _lenient(self._batch, body, BATCH_FIELDS)


def read_body(body: bytes, kind: type[Small]) -> Small:
    """Read a body that is not a task, or raise `InvalidTaskError`."""
    known = tuple(field.encode_name for field in msgspec.structs.fields(kind))
    decoder: msgspec.json.Decoder[Small] = _decoder(kind)
    return _lenient(decoder, body, known)


@cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def check_unknown(names: Iterable[str], known: tuple[str, ...]) -> None:
    """Raise `InvalidTaskError` for a name that is almost that of a known field."""
    unknown = [name for name in names if name not in known]
    if len(unknown) > MAX_FIELDS:
        problem = f"{len(unknown)} fields are unknown, at most {MAX_FIELDS} are passed over"
        raise InvalidTaskError("unknown_field", shown(unknown[0]), problem)
    for name in unknown:
        meant = _almost(shown(name), known)
        if meant is not None:
            message = f"unknown field '{shown(name)}'; did you mean '{meant}'?"
            raise InvalidTaskError("unknown_field", shown(name), message)


def shown(text: str) -> str:
    """Return as much of a client's text as fits in a message, and no token that is in it."""
    if "hg_" in text:
        text = _TOKEN.sub("hg_…", text)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _lenient(
    decoder: msgspec.json.Decoder[Body], body: bytes | msgspec.Raw, known: tuple[str, ...]
) -> Body:
    try:
        str(body, "utf-8")  # The decoder does not look at the text of fields that it passes over.
        check_unknown(_NAMES.decode(body), known)
        return decoder.decode(body)
    except InvalidTaskError:
        raise
    except (ValueError, RecursionError) as error:
        raise _refusal(error) from None


@lru_cache(maxsize=1024)
def _almost(name: str, known: tuple[str, ...]) -> str | None:
    squeezed = name.replace("_", "").replace("-", "").lower()
    for field in known:
        if field.lower() == squeezed:
            return field
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)), None)


def _refusal(error: Exception) -> InvalidTaskError:
    if isinstance(error, RecursionError):
        return InvalidTaskError("bad_json", "", "the body is nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        return InvalidTaskError("bad_json", "", f"the body is not JSON: {shown(str(error))}")
    missing = _MISSING_FIELD.match(str(error))
    if missing is not None:
        message = f"missing required field '{missing[1]}'"
        return InvalidTaskError("missing_field", missing[1], message)
    problem, _, place = str(error).partition(" - at ")
    field = place.strip("`").removeprefix("$").removeprefix(".")
    if not field:
        return InvalidTaskError("bad_json", "", "the body must be a JSON object")
    return InvalidTaskError("invalid_field", field, f"field '{field}': {_plain(problem)}")


def _plain(problem: str) -> str:
    text = problem.replace(" | null", "").replace("`", "")
    return shown(text[:1].lower() + text[1:])
