"""From a step and what is known when it runs to a request: the work with everything filled in.

A request is what a backend carries out, and what a local one keeps as the input of its task.
Rule: a variable of the environment stays a named part of its text (`EnvPlace`), so that no value of
one is ever stored; whoever carries out the request puts it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headgate.workflow.texts import FilledText, Text, View, fill, fill_template
from headgate.workflow.workflow import (
    CallWork,
    CommandWork,
    HttpWork,
    ModelWork,
    TargetWork,
    Work,
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


def request_of(work: Work, view: View) -> Request:
    """Fill the work of a step; `UnfilledError` says which place could not be filled."""
    match work:
        case CommandWork():
            return _command(work, view)
        case HttpWork():
            return _http(work, view)
        case CallWork(entry_point=entry_point, given=given):
            value = msgspec.UNSET if given is None else fill_template(given, view)
            return CallRequest(entry_point=entry_point, given=value)
        case ModelWork(endpoint=endpoint, model=model, max_tokens=max_tokens):
            body = fill_template(work.body, view)
            return ModelRequest(endpoint=endpoint, model=model, body=body, max_tokens=max_tokens)
        case TargetWork():
            return _target(work, view)


def _command(work: CommandWork, view: View) -> CommandRequest:
    return CommandRequest(
        command=tuple([fill(argument, view) for argument in work.command]),
        env=_texts(work.env, view),
        pass_env=work.pass_env,
        stdin=_plain(work.stdin, view),
        cwd=None if work.cwd is None else fill(work.cwd, view),
    )


def _http(work: HttpWork, view: View) -> HttpRequest:
    return HttpRequest(
        url=fill(work.url, view),
        method=work.method,
        headers=_texts(work.headers, view),
        body=msgspec.UNSET if work.body is None else fill_template(work.body, view),
    )


def _target(work: TargetWork, view: View) -> TargetRequest:
    return TargetRequest(
        target=work.target,
        action=_plain(work.action, view),
        params=None if work.params is None else fill_template(work.params, view),
        input=None if work.input is None else fill_template(work.input, view),
        tab_id=_plain(work.tab_id, view),
        selector=_plain(work.selector, view),
        ref=_plain(work.ref, view),
        slot=work.slot,
        provider=work.provider,
    )


def _texts(texts: Mapping[str, Text], view: View) -> dict[str, FilledText]:
    return {name: fill(text, view) for name, text in texts.items()}


def _plain(text: Text | None, view: View) -> str | None:
    """Fill a text that has no variables in it: the file was refused otherwise."""
    if text is None:
        return None
    filled = fill(text, view)
    return filled if isinstance(filled, str) else "".join(map(str, filled))
