"""The page of the SDK clients has every name and every field, and the fields are written once."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import headgate.inprocess.sdk
from doc_pages import rows_under
from headgate.inprocess.sdk import Governor
from headgate.inprocess.sdk.clients import GovernorFields
from headgate.providers.usage import MAX_BODY_BYTES, MAX_LINE_BYTES

PAGE = (Path(__file__).parents[3] / "docs/reference/sdk.md").read_text()
FIELDS = inspect.signature(Governor).parameters


@pytest.mark.parametrize("name", headgate.inprocess.sdk.__all__)
def test_every_name_is_there(name: str) -> None:
    assert f"`{name}" in PAGE


def test_every_field_is_there_with_its_default() -> None:
    rows = rows_under(PAGE, "Fields")
    written = [(row[0].strip("`"), row[1].strip("`").replace('"', "'")) for row in rows]
    assert written == [(name, repr(field.default)) for name, field in FIELDS.items()]


def test_clients_take_the_fields_of_a_governor() -> None:
    assert list(GovernorFields.__annotations__) == list(FIELDS)
    for name, field in FIELDS.items():
        assert GovernorFields.__annotations__[name].__forward_arg__ == field.annotation


def test_the_limits_are_those_of_the_page() -> None:
    assert f"{MAX_BODY_BYTES >> 20} MiB" in PAGE
    assert f"{MAX_LINE_BYTES >> 20} MiB" in PAGE
