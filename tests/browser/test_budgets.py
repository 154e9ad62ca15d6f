"""Budgets: one that is used up holds a task, and raising it lets the task start."""

from __future__ import annotations

from playwright.sync_api import expect

from browser.live_service import Live
from browser.visiting import Visitor, was_done

TIGHT = {"scopes": ["session:tight"], "estimate": {"tokens": 1000}}


def test_a_budget_is_used_up_raised_and_the_task_that_waited_starts(
    visitor: Visitor, live: Live
) -> None:
    spent = live.service.submit(**TIGHT)
    live.service.wait_for(spent, "done")
    held = live.service.submit(**TIGHT)
    overview = visitor("/")
    expect(overview.locator(".attention")).to_contain_text("session:tight")
    task = visitor(f"/ui/tasks/{held}")
    task.locator(".reasons").get_by_role("link", name="session:tight").click()
    expect(task.get_by_role("heading", level=1)).to_contain_text("session:tight")
    expect(task.locator("#scope-now")).to_contain_text("used up")
    expect(task.locator("#scope-now")).to_contain_text("1 task or call waits")
    task.get_by_role("textbox", name="Tokens").fill("5000")
    task.get_by_role("button", name="Save").click()
    was_done(task, "is set")
    live.service.wait_for(held, "done")
    tokens = task.locator("#scope-now tr", has_text="Tokens").locator("[data-label=Spent]")
    expect(tokens).to_have_text("2,000")
    expect(task.locator(f"#journal a[href='/ui/tasks/{held}']")).not_to_have_count(0)
    expect(overview.locator("body")).not_to_contain_text("used up")


def test_a_limit_is_set_changed_and_removed(visitor: Visitor, live: Live) -> None:
    page = visitor("/ui/budgets")
    page.locator("summary", has_text="Set a budget").click()
    page.get_by_role("textbox", name="Scope").fill("session:made/workflow:here")
    page.get_by_role("textbox", name="Dollars").fill("12.50")
    page.get_by_role("combobox", name="Window").fill("day")
    page.get_by_role("button", name="Set", exact=True).click()
    was_done(page, "session:made/workflow:here")
    expect(page.locator("#scope-now")).to_contain_text("$12.50")
    page.locator("summary", has_text="Remove the limit").click()
    page.get_by_role("button", name="Remove", exact=True).click()
    was_done(page, "no limit")


def test_a_limit_that_cannot_be_is_refused_with_the_reason(visitor: Visitor) -> None:
    page = visitor("/ui/budgets?scope=session%3Atight")
    page.get_by_role("textbox", name="Tokens").fill("-5")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("alert")).to_contain_text("Not done:")


def test_the_tree_leads_to_each_scope_and_back(visitor: Visitor, live: Live) -> None:
    page = visitor("/ui/budgets")
    page.locator("#scopes").get_by_role("link", name="session:tight").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("session:tight")
    page.get_by_role("link", name="the whole service").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("the whole service")
    page.get_by_role("link", name="All budgets").click()
    expect(page).to_have_url(live.url("/ui/budgets"))
