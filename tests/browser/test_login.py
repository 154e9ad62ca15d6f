"""The way in and out: tokens, cookies, forms of others, and the theme."""

from __future__ import annotations

from playwright.sync_api import expect

from browser.live_service import Live
from browser.visiting import Visitor
from browser.watching import Watch


def test_a_wrong_token_is_refused_and_a_right_one_leads_to_the_page_that_was_wanted(
    visitor: Visitor, live: Live, watch: Watch
) -> None:
    watch.expect("status of 401")
    page = visitor("/ui/tasks?state=failed", is_let_in=False)
    expect(page).to_have_title("Log in · Headgate")
    token = page.get_by_label("Token")
    expect(token).to_be_focused()
    token.fill("hg_wrong")
    token.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Login failed")
    expect(token).to_have_value("")
    token.fill(live.service.token)
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(live.url("/ui/tasks?state=failed"))
    cookies = {one["name"]: one for one in page.context.cookies()}
    assert cookies["headgate_token"]["httpOnly"]
    assert cookies["headgate_token"]["sameSite"] == "Strict"
    assert page.evaluate("document.cookie") == ""


def test_whoever_logs_out_is_asked_again(visitor: Visitor, live: Live) -> None:
    page = visitor("/")
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_url(live.url("/ui/login"))
    page.goto(live.url("/ui/budgets"))
    expect(page.get_by_role("heading", name="Log in to Headgate")).to_be_visible()
    page.go_back()
    expect(page.get_by_label("Token")).to_be_visible()


def test_a_form_without_its_secret_is_refused(visitor: Visitor, live: Live, watch: Watch) -> None:
    watch.expect("status of 403")
    task = live.service.submit()
    live.service.wait_for(task)
    page = visitor(f"/ui/tasks/{task}")
    for field in page.locator("input[name=csrf]").all():
        field.evaluate("field => { field.value = '0'.repeat(32); }")
    page.get_by_text("Retry", exact=True).click()
    page.get_by_role("button", name="Submit it again").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("The form is too old")
    assert live.service.ask("GET", f"/tasks?text={task}").body["tasks"][0]["taskId"] == task


def test_the_theme_changes_at_once_and_is_kept(visitor: Visitor, live: Live) -> None:
    page = visitor("/", color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="Change between light and dark").click()
    dark = page.evaluate(background)
    assert dark != light
    page.goto(live.url("/ui/tasks"))
    assert page.evaluate(background) == dark
    page.get_by_role("button", name="Change between light and dark").click()
    assert page.evaluate(background) == light
