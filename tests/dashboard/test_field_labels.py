"""Fields are called in messages what their forms call them, and numbers are what people write."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.browser import Browser, serving, text_of
from headgate.api.errors import ApiError, invalid_field
from headgate.api.submission import parse_identifier
from headgate.dashboard.forms import (
    AGENT_FIELDS,
    BUDGET_FIELDS,
    CALL_FIELDS,
    FILTER_FIELDS,
    PROJECT_FIELDS,
    SETTINGS_FIELDS,
    TOKEN_FIELDS,
    WEBHOOK_FIELDS,
    error_text,
    float_of,
    integer_of,
)
from headgate.dashboard.page import Form
from headgate.errors import InvalidFieldError, InvalidSettingError

SETTINGS = "[projects.search]\n[agents.writer]\n"
ON_NO_FORM = {"status", "state", "permissions", "reset"}
"""Sent by buttons, or by boxes that stand together."""


@pytest.mark.parametrize(
    ("url", "labels"),
    [
        ("/ui/budgets", BUDGET_FIELDS),
        ("/ui/projects/search", PROJECT_FIELDS),
        ("/ui/projects", AGENT_FIELDS),
        ("/ui/tasks", FILTER_FIELDS),
        ("/ui/calls", CALL_FIELDS),
        ("/ui/webhooks", WEBHOOK_FIELDS),
        ("/ui/settings", SETTINGS_FIELDS),
        ("/ui/settings/tokens", TOKEN_FIELDS),
    ],
)
async def test_every_field_of_a_form_stands_beside_the_label_of_the_table(
    tmp_path: Path, url: str, labels: dict[str, str]
) -> None:
    async with serving(tmp_path, SETTINGS) as (_, app):
        page = (await Browser(app).get(url)).body.decode()
    for name, label in labels.items():
        if name in ON_NO_FORM:
            continue
        found = re.search(rf'<(?:input|select)(?: [^>]*)? name="{name}"', page)
        assert found is not None, name
        before = page[: found.start()].rpartition("<label")[2].partition(">")[2]
        assert text_of(before).startswith(label), name


def test_a_problem_is_told_by_the_label_of_its_field_wherever_it_comes_from() -> None:
    labels = {"window": "Window", "agentId": "Agent", "url": "Address"}
    with pytest.raises(InvalidFieldError) as found:
        parse_identifier("\0", "agentId")
    for error, words in (
        (InvalidFieldError("window", "is no window"), "Window: is no window"),
        (InvalidSettingError('budgets."session:a.b".window', "is none"), "Window: is none"),
        (InvalidSettingError("budgets.root", "limits nothing"), "budgets.root: limits nothing"),
        (InvalidSettingError('budgets."a.window"', "is none"), 'budgets."a.window": is none'),
        (invalid_field("url", "is too long"), "Address: is too long"),
        (found.value, "Agent: must be printable, without spaces at its ends"),
        (ApiError("conflict", "it has ended"), "it has ended"),
    ):
        assert error_text(error, labels) == words


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("1500", 1_500), ("1,500", 1_500), ("1 500", 1_500), ("12,345,678", 12_345_678)],
)
def test_thousands_may_be_set_apart(text: str, number: int) -> None:
    assert integer_of(Form({"n": [text]}), "n") == number
    assert float_of(Form({"n": [text]}), "n") == number
    assert float_of(Form({"n": [f"{text}.25"]}), "n") == number + 0.25


@given(st.text(st.sampled_from("0123456789,. -+_eE\uff11\u00a0"), min_size=1, max_size=9))
def test_what_is_taken_as_a_number_is_the_number_that_was_written(text: str) -> None:
    for read, plain in ((integer_of, int), (float_of, float)):
        try:
            number = read(Form({"n": [text]}), "n")
        except InvalidFieldError:
            continue
        if isinstance(number, (int, float)):
            assert text.strip().isascii()
            assert "_" not in text
            assert number == plain(text.strip().replace(",", "").replace(" ", ""))
            assert all(len(part) == 3 for part in re.findall(r"[, ]([0-9]+)", text.strip()))


@given(st.floats(min_value=0, max_value=1e300))
def test_a_weight_is_read_again_as_a_form_writes_it(weight: float) -> None:
    shown = f"{weight:g}"
    assert float_of(Form({"n": [shown]}), "n") == float(shown)


async def test_a_link_fills_the_form_of_a_budget_and_sets_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        query = urlencode({"new": "<script>", "limit_usd": '"><b>'})
        answer = await Browser(app).get(f"/ui/budgets?{query}")
    assert answer.status == 200
    assert b'<script>"' not in answer.body
    assert b'value="&lt;script&gt;"' in answer.body
