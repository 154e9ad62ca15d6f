"""Calls to models: from the keys of a step to the whole request that its endpoint wants.

Rule: every request says how long its answer may be, because that is what its money is held for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headgate.providers.prices import MAX_MODEL_LENGTH
from headgate.workflow.config import BUILT_IN, Defaults, read_endpoint_name, read_max_tokens
from headgate.workflow.document import Uses, Value
from headgate.workflow.placeholders import Place, Template, Text, as_string
from headgate.workflow.workflow import Endpoint, ModelWork

MODEL_KEYS = (
    "model",
    "prompt",
    "messages",
    "system",
    "max_tokens",
    "temperature",
    "endpoint",
    "options",
)
MAX_TEMPERATURE = 2
LIMITS = ("max_tokens", "max_completion_tokens")
"""The names under which requests say how long an answer may be."""

_OWN_KEYS = ("model", "messages", "system", "temperature")
_ANTHROPIC_MODELS = ("claude",)


def read_model(
    step: Value,
    fields: Mapping[str, Value],
    uses: Uses,
    *,
    defaults: Defaults,
    endpoints: Mapping[str, Endpoint],
) -> ModelWork:
    """Read a call to a model."""
    model_value = fields.get("model") or defaults.model
    if model_value is None:
        step.refuse("has no model; write model, or config.defaults.model")
    model = _model(model_value, uses)
    endpoint = _endpoint(step, fields, model, defaults, endpoints)
    options = _options(fields.get("options"), uses)
    max_tokens = _max_tokens(fields, options, defaults)
    return ModelWork(
        endpoint=endpoint.name,
        model=model_value.word(),
        body=Template(
            value={
                "model": model,
                **_conversation(step, fields, uses, endpoint),
                **({} if _has_limit(options) else {_limit_name(endpoint): max_tokens}),
                **_temperature(fields),
                **options,
            }
        ),
        max_tokens=max_tokens,
    )


def _model(value: Value, uses: Uses) -> str | Text:
    model = _string(uses.stored_text(value))
    if not value.word() or len(value.word()) > MAX_MODEL_LENGTH:
        value.refuse(f"must be a name of 1 to {MAX_MODEL_LENGTH} characters")
    return model


def _endpoint(
    step: Value,
    fields: Mapping[str, Value],
    model: str | Text,
    defaults: Defaults,
    endpoints: Mapping[str, Endpoint],
) -> Endpoint:
    if "endpoint" in fields:
        return endpoints[read_endpoint_name(fields["endpoint"], endpoints)]
    if defaults.endpoint is not None:
        return endpoints[defaults.endpoint]
    if len(endpoints) > len(BUILT_IN):
        # Whoever lists an endpoint may mean it, and is not billed by another one for a guess.
        problem = f"has no endpoint; write endpoint as one of {', '.join(endpoints)}"
        step.refuse(f"{problem}, or config.defaults.endpoint")
    is_claude = isinstance(model, str) and model.lower().startswith(_ANTHROPIC_MODELS)
    return endpoints["anthropic" if is_claude else "openai"]


def _options(value: Value | None, uses: Uses) -> dict[str, Any]:
    if value is None:
        return {}
    for key, entry in value.entries("options").items():
        if key in _OWN_KEYS:
            entry.refuse(f"is a key of the step; write {key} beside options")
        if key == "stream":
            entry.refuse("is not for steps, which take answers whole; leave it out")
        if key in LIMITS:
            read_max_tokens(entry)
    options: dict[str, Any] = uses.template(value).value
    return options


def _max_tokens(fields: Mapping[str, Value], options: Mapping[str, Any], defaults: Defaults) -> int:
    if not _has_limit(options):
        return (
            read_max_tokens(fields["max_tokens"]) if "max_tokens" in fields else defaults.max_tokens
        )
    if "max_tokens" in fields:
        fields["max_tokens"].refuse("is in options, too; keep one of them")
    limits: list[int] = [options[name] for name in LIMITS if name in options]
    return max(limits)


def _has_limit(options: Mapping[str, Any]) -> bool:
    return any(name in options for name in LIMITS)


def _limit_name(endpoint: Endpoint) -> str:
    """Return how an endpoint calls the limit of an answer.

    OpenAI's later models know only the later name; servers that speak its language know the
    earlier one, and some of them pass over the later.
    """
    return "max_completion_tokens" if endpoint is BUILT_IN["openai"] else "max_tokens"


def _temperature(fields: Mapping[str, Value]) -> dict[str, float]:
    value = fields.get("temperature")
    return {} if value is None else {"temperature": value.number(0, MAX_TEMPERATURE)}


def _conversation(
    step: Value, fields: Mapping[str, Value], uses: Uses, endpoint: Endpoint
) -> dict[str, Any]:
    """Return the messages, and what goes before them as the kind of the endpoint wants it."""
    messages = _messages(step, fields, uses)
    if "system" not in fields:
        return {"messages": messages}
    system = _string(uses.stored_text(fields["system"]))
    if endpoint.kind == "anthropic":
        return {"system": system, "messages": messages}
    if not isinstance(messages, list):
        problem = "cannot go before messages that are a place; put it into them"
        fields["system"].refuse(problem)
    return {"messages": [{"role": "system", "content": system}, *messages]}


def _messages(step: Value, fields: Mapping[str, Value], uses: Uses) -> list[Any] | Text:
    if "prompt" in fields and "messages" in fields:
        fields["messages"].refuse("stands beside prompt; keep one of them")
    if "prompt" in fields:
        return [{"role": "user", "content": _string(uses.stored_text(fields["prompt"]))}]
    if "messages" not in fields:
        step.refuse("has nothing to ask; write prompt or messages")
    return _written_messages(fields["messages"], uses)


def _written_messages(value: Value, uses: Uses) -> list[Any] | Text:
    messages = uses.template(value).value
    if isinstance(messages, Text) and len(messages.parts) == 1:
        return messages
    entries = value.items("messages, or one place such as {item.messages}")
    if not entries:
        value.refuse("has no messages; write at least one")
    for number, entry in enumerate(entries):
        message = messages[number]
        if isinstance(message, Text) and len(message.parts) == 1:
            continue
        if "role" not in entry.entries("role and content"):
            entry.refuse("has no role; write one, as user")
    found: list[Any] = messages
    return found


def _string(text: Text) -> str | Text:
    places: list[Place] = [part for part in text.parts if not isinstance(part, str)]
    return as_string(text) if places else "".join(map(str, text.parts))
