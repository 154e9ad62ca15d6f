"""Endpoints: where models are asked, those of the file and those that are always there.

`openai` and `anthropic` read the variables that the SDKs of the two providers read. Rule: the kind
of an endpoint decides the path and the form of a request, never the name of a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from headgate.workflow.terms import MAX_NAME_LENGTH
from headgate.workflow.texts import EnvPlace, Text
from headgate.workflow.uses import only_variables, read_headers, read_url
from headgate.workflow.values import Value
from headgate.workflow.workflow import Endpoint

Kind = Literal["openai", "anthropic"]

ENDPOINT_KEYS = ("kind", "url", "key", "headers")
PATHS: dict[Kind, str] = {"openai": "/chat/completions", "anthropic": "/v1/messages"}
"""What follows the URL of an endpoint of a kind."""


def _built_in(kind: Kind, *, prefix: str, url: str) -> Endpoint:
    address = EnvPlace(name=f"{prefix}_BASE_URL", default=url)
    key = Text(parts=(EnvPlace(name=f"{prefix}_API_KEY"),))
    return Endpoint(name=kind, kind=kind, url=Text(parts=(address,), is_url=True), key=key)


BUILT_IN = {
    "openai": _built_in("openai", prefix="OPENAI", url="https://api.openai.com/v1"),
    "anthropic": _built_in("anthropic", prefix="ANTHROPIC", url="https://api.anthropic.com"),
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def read_endpoints(value: Value | None) -> dict[str, Endpoint]:
    """Read the endpoints of a file, beside those that are always there."""
    endpoints = dict(BUILT_IN)
    for name, entry in ({} if value is None else value.entries("endpoints")).items():
        if len(name) > MAX_NAME_LENGTH or _NAME.fullmatch(name) is None:
            entry.refuse("is no name of an endpoint; write letters, digits and . _ -")
        endpoints[name] = _endpoint(name, entry)
    return endpoints


def read_endpoint_name(value: Value, endpoints: Mapping[str, Endpoint]) -> str:
    """Read the name of an endpoint, which must be there."""
    return value.choice(tuple(endpoints))


def _endpoint(name: str, value: Value) -> Endpoint:
    fields = value.fields(ENDPOINT_KEYS, "an endpoint")
    for key in ("kind", "url"):
        if key not in fields and name not in BUILT_IN:
            value.refuse(f"has no {key}; write it")
    read = {key: _READERS[key](entry) for key, entry in fields.items()}
    if name in BUILT_IN:
        return msgspec.structs.replace(BUILT_IN[name], line=value.line, **read)
    return Endpoint(name=name, line=value.line, **read)


_READERS: dict[str, Callable[[Value], Any]] = {
    "kind": lambda value: value.choice(tuple(PATHS)),
    "url": lambda value: read_url(value, only_variables),
    "key": only_variables,
    "headers": lambda value: read_headers(value, only_variables),
}
