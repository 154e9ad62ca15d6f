"""What a function is called with, by the names of its parameters.

A model and a prompt may be given by position or by keyword, be a default, or come from a partial;
what a function says of itself tells which is which.

Rule: nothing is guessed. Of a function that does not say what it takes only keywords are known, and
where there is no `model` to replace, that is an error: the dear one would run on the money that was
held for the cheap one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from headgate.errors import InvalidFieldError

MODEL = "model"
SPREAD = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def named_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included."""
    bound = _bound(function, args, kwargs)
    if bound is None:
        return kwargs
    further = _further(bound)
    named = {name: value for name, value in bound.arguments.items() if name != further}
    return named if further is None else {**bound.arguments[further], **named}


def with_model(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: str | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another model in its place, or say that it has none."""
    bound = _bound(function, args, kwargs)
    if bound is None:
        if MODEL in kwargs:
            return args, {**kwargs, MODEL: model}
        raise _no_model(function)
    own = bound.signature.parameters.get(MODEL)
    further = _further(bound)
    if own is not None and own.kind not in SPREAD:
        bound.arguments[MODEL] = model
    elif further is not None and MODEL in bound.arguments[further]:
        bound.arguments[further] = {**bound.arguments[further], MODEL: model}
    else:
        raise _no_model(function)
    return bound.args, bound.kwargs


def _bound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments | None:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        # It has no signature, or arguments that do not fit, which the call itself will tell.
        return None
    bound.apply_defaults()
    return bound


def _further(bound: inspect.BoundArguments) -> str | None:
    """Return the name of the parameter that takes all other keywords, if there is one."""
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return name
    return None


def _no_model(function: Callable[..., Any]) -> InvalidFieldError:
    name = getattr(function, "__qualname__", type(function).__name__)
    problem = f"is no argument of {name}, so a cheaper one cannot take its place; let it take one"
    return InvalidFieldError(MODEL, problem)
