"""The page of the clients has every verb with its signature, and every error."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from headgate import SyncClient
from headgate.client.requests import TaskFilter
from headgate.errors import ServiceError

PAGE = (Path(__file__).parent.parent.parent / "docs/reference/client.md").read_text()


def written(signature: inspect.Signature, *, skipped: int) -> str:
    """Return a signature as the page writes it: without annotations."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in list(signature.parameters.values())[skipped:]
    ]
    return str(inspect.Signature(parameters)).replace("'", '"')


VERBS = [
    (name, written(inspect.signature(value), skipped=1))
    for name, value in inspect.getmembers(SyncClient, inspect.isfunction)
    if not name.startswith("_")
]


@pytest.mark.parametrize(("name", "signature"), VERBS, ids=[name for name, _ in VERBS])
def test_every_verb_is_there_with_its_signature(name: str, signature: str) -> None:
    assert f"`{name}{signature}`" in PAGE


def test_the_constructor_is_there() -> None:
    assert f"`SyncClient{written(inspect.signature(SyncClient), skipped=0)}`" in PAGE


def test_every_error_is_there() -> None:
    def tree_of(kind: type[ServiceError]) -> list[type[ServiceError]]:
        return [kind, *(inner for child in kind.__subclasses__() for inner in tree_of(child))]

    for kind in tree_of(ServiceError):
        assert f"`{kind.__name__}`" in PAGE


def test_every_way_to_say_which_tasks_is_there() -> None:
    for name in TaskFilter.__annotations__:
        assert f"`{name}`" in PAGE
