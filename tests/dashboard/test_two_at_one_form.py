"""Two people at one form: each changes what it edited, and neither takes the other's back."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from api.asgi_client import answer_of
from dashboard.browser import Browser, serving
from headgate.api.app import App

SETTINGS = """
[projects.beta]
credit_weight = 1.23456789
[projects.crawl]
budget_limit = 500
[agents.writer]
capacity = 2
[budgets."session:eval"]
limit_usd = "1"
window = "day"
"""
EVAL = "/budgets?scope=session:eval"


class Case(NamedTuple):
    """A form, what a colleague changes behind it, and what its sender edits otherwise."""

    page: str
    action: str
    api: str
    changed: tuple[str, str, Any]
    """The field as the form and the API call it, and its new value."""
    said: str


CASES = (
    Case(
        "/ui/projects/beta",
        "/ui/projects/beta/change",
        "/projects/beta",
        ("credit_weight", "creditWeight", 9.0),
        "Weight: is 9 now, and was 1.23456789 when this form was drawn.",
    ),
    Case(
        "/ui/projects",
        "/ui/agents/writer/change",
        "/agents/writer",
        ("capacity", "capacity", 9),
        "Capacity: is 9 now, and was 2 when this form was drawn.",
    ),
    Case(
        "/ui/budgets?scope=session:eval",
        "/ui/budgets/limit",
        EVAL,
        ("limit_tokens", "limitTokens", 700),
        "Tokens: is 700 now, and was none when this form was drawn.",
    ),
    Case(
        "/ui/budgets?scope=project:crawl",
        "/ui/budgets/limit",
        "/projects/crawl",
        ("limit_tokens", "budgetLimit", 700),
        "Tokens: is 700 now, and was 500 when this form was drawn.",
    ),
)


def drawn_form(page: bytes, action: str, field: str) -> dict[str, str]:
    """Return what a browser sends of the form that has a field, if nothing is typed."""
    forms = re.findall(rf'<form [^>]*action="{action}".*?</form>', page.decode(), re.DOTALL)
    form = next(one for one in forms if f'name="{field}"' in one)
    inputs = re.findall(r'<input [^>]*name="([^"]*)"[^>]* value="([^"]*)"', form)
    return {name: html.unescape(value) for name, value in inputs}


async def opened(browser: Browser, case: Case) -> dict[str, str]:
    page = await browser.get(case.page)
    return drawn_form(page.body, case.action, case.changed[0])


async def change_behind(app: App, case: Case) -> None:
    _, name, value = case.changed
    answer = await answer_of(app, "PATCH", case.api, json.dumps({name: value}).encode())
    assert answer.status == 200, answer.body


async def held(app: App, case: Case) -> Any:
    path, _, scope = case.api.partition("?scope=")
    body = (await answer_of(app, "GET", path)).json
    if scope:
        body = next(one for one in body["budgets"] if one["scope"] == scope)
    return body[case.changed[1]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.api)
async def test_a_field_that_both_changed_is_refused_and_drawn_anew(
    case: Case, tmp_path: Path
) -> None:
    async with serving(tmp_path, SETTINGS) as (_, app):
        browser, field = Browser(app), case.changed[0]
        sent = await opened(browser, case)
        await change_behind(app, case)
        page, said = await browser.act(case.action, {**sent, field: "3"})
        assert said == f"Not done: {case.said}"
        assert await held(app, case) == case.changed[2]
        anew = drawn_form(page.body, case.action, field)
        assert anew[field] == anew[f"drawn.{field}"] == f"{case.changed[2]:g}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.api)
async def test_a_form_that_is_sent_as_it_was_drawn_changes_nothing(
    case: Case, tmp_path: Path
) -> None:
    async with serving(tmp_path, SETTINGS) as (_, app):
        browser = Browser(app)
        sent = await opened(browser, case)
        await change_behind(app, case)
        _, said = await browser.act(case.action, sent)
        assert said.endswith("did not change: the form had the present values.")
        assert await held(app, case) == case.changed[2]


@pytest.mark.parametrize(
    ("case", "edited", "said"),
    [
        (
            CASES[0],
            {"max_concurrent_agents": "7"},
            "project beta was changed: Cap on tasks in flight 7",
        ),
        (
            CASES[2],
            {"limit_usd": "4"},
            "the budget of session:eval is set to $4.00 and 700 tokens, by the day of UTC",
        ),
    ],
    ids=["project", "budget"],
)
async def test_a_field_that_only_a_colleague_changed_stays_as_the_colleague_left_it(
    case: Case, edited: dict[str, str], said: str, tmp_path: Path
) -> None:
    async with serving(tmp_path, SETTINGS) as (_, app):
        browser = Browser(app)
        sent = await opened(browser, case)
        await change_behind(app, case)
        _, told = await browser.act(case.action, {**sent, **edited})
        assert told.startswith(f"Done: {said}")
        assert await held(app, case) == case.changed[2]


@pytest.mark.parametrize(
    ("case", "emptied", "said"),
    [
        (CASES[0], "credit_weight", "project beta was changed: Weight 1;"),
        (
            CASES[0],
            "max_concurrent_agents",
            "project beta was changed: Cap on tasks in flight no",
        ),
        (CASES[1], "capacity", "agent writer was changed: Capacity 10."),
    ],
    ids=["weight", "cap", "capacity"],
)
async def test_of_a_field_that_was_emptied_is_said_what_holds(
    case: Case, emptied: str, said: str, tmp_path: Path
) -> None:
    toml = SETTINGS.replace("1.23456789", "5\nmax_concurrent_agents = 4")
    async with serving(tmp_path, toml) as (_, app):
        browser = Browser(app)
        sent = await opened(browser, case)
        _, told = await browser.act(case.action, {**sent, emptied: ""})
        assert told.startswith(f"Done: {said}")
