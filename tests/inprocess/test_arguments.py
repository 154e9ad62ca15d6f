"""Which model and prompt a function is called with, however they are given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from headgate.errors import InvalidFieldError
from headgate.inprocess.calls import named_arguments, with_model


def ask(prompt: str, model: str = "opus", *, system: str = "") -> tuple[str, str]:
    return prompt, model


def only_by_position(prompt: str = "", model: str = "opus", /) -> tuple[str, str]:
    return prompt, model


def with_options(prompt: str, **options: Any) -> tuple[str, str]:
    return prompt, options["model"]


@functools.wraps(ask)
def decorated(*args: Any, **kwargs: Any) -> tuple[str, str]:
    return ask(*args, **kwargs)


class Client:
    def ask(self, prompt: str, model: str = "opus") -> tuple[str, str]:
        return prompt, model


CALLS: list[tuple[Callable[..., tuple[str, str]], tuple[str, ...], dict[str, str]]] = [
    (ask, ("why?",), {}),
    (ask, ("why?", "opus"), {}),
    (ask, ("why?",), {"model": "opus"}),
    (ask, (), {"model": "opus", "prompt": "why?"}),
    (only_by_position, ("why?",), {}),
    (with_options, ("why?",), {"model": "opus"}),
    (decorated, ("why?",), {}),
    (Client().ask, ("why?", "opus"), {}),
    (functools.partial(ask, model="opus"), ("why?",), {}),
    (functools.partial(ask, prompt="why?"), (), {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS)
def test_an_argument_is_known_by_its_name_however_it_is_given(
    function: Callable[..., tuple[str, str]], args: tuple[str, ...], kwargs: dict[str, str]
) -> None:
    named = named_arguments(function, args, kwargs)
    assert (named["prompt"], named["model"]) == ("why?", "opus")


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS)
def test_a_model_is_replaced_wherever_it_is_and_nothing_else(
    function: Callable[..., tuple[str, str]], args: tuple[str, ...], kwargs: dict[str, str]
) -> None:
    new_args, new_kwargs = with_model(function, args, kwargs, "haiku")
    assert function(*new_args, **new_kwargs) == ("why?", "haiku")


@pytest.mark.parametrize(
    ("function", "kwargs"),
    [(answer := lambda prompt="": prompt, {}), (with_options, {"prompt": "why?"}), (max, {})],
)
def test_a_function_without_a_model_cannot_have_it_replaced(
    function: Callable[..., object], kwargs: dict[str, str]
) -> None:
    with pytest.raises(InvalidFieldError, match="is no argument of"):
        with_model(function, (), kwargs, "haiku")


def test_of_a_function_without_a_signature_only_keywords_are_known() -> None:
    assert named_arguments(max, (1,), {"key": None}) == {"key": None}
    assert with_model(max, (1,), {"model": "opus"}, "haiku") == ((1,), {"model": "haiku"})
