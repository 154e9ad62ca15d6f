"""Settings: reloaded with what changed, searched, audited; tokens made and revoked."""

from __future__ import annotations

from playwright.sync_api import expect

from browser.live_service import KEY, Live
from browser.visiting import Visitor, was_done


def test_a_reload_shows_what_it_changed_and_a_bad_file_changes_nothing(
    visitor: Visitor, live: Live
) -> None:
    before = live.settings.read_text()
    page = visitor("/ui/settings")
    try:
        live.settings.write_text(before.replace("max_inflight = 100", "max_inflight = 90"))
        page.get_by_role("button", name="Reload now").click()
        was_done(page, "Headgate read the file")
        last = page.locator("#state-of-settings")
        expect(last).to_contain_text("scheduler.max_inflight")
        expect(last).to_contain_text("90")
        live.settings.write_text(before.replace("max_inflight = 100", "max_inflight = 'many'"))
        page.get_by_role("button", name="Reload now").click()
        expect(page.get_by_role("alert")).to_contain_text("max_inflight")
        expect(page.locator("#values-in-force")).to_contain_text("90")
    finally:
        live.settings.write_text(before)
        assert live.service.ask("POST", "/scheduler/reload").status == 200


def test_settings_are_searched_and_tell_no_secret(visitor: Visitor, live: Live) -> None:
    page = visitor("/ui/settings?all=yes")
    assert KEY not in page.content()
    page.get_by_label("Text").fill("tick")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.locator("#values-in-force")).to_contain_text("scheduler.tick_seconds")
    expect(page.locator("#values-in-force")).not_to_contain_text("server.port")


def test_an_override_is_listed_and_ended(visitor: Visitor, live: Live) -> None:
    changed = live.service.ask("PATCH", "/projects/narrow", {"creditWeight": 4})
    assert changed.status == 200, changed
    page = visitor("/ui/settings")
    row = page.get_by_role("row").filter(has_text="projects.narrow.credit_weight").first
    row.locator("summary").click()
    row.get_by_role("button", name="End the override").click()
    was_done(page, "the value of the file applies again")
    page.get_by_role("link", name="Audit log").first.click()
    expect(page.locator("#entries")).to_contain_text("narrow")


def test_a_token_is_made_shown_once_used_and_revoked(visitor: Visitor, live: Live) -> None:
    page = visitor("/ui/settings/tokens")
    page.get_by_label("Name").fill("a reader")
    page.get_by_role("checkbox", name="submit").uncheck()
    page.get_by_role("checkbox", name="cancel").uncheck()
    page.get_by_role("button", name="Create the token").click()
    text = page.locator(".made code").inner_text()
    assert text.startswith("hg_")
    page.goto(live.url("/ui/settings/tokens"))
    assert text not in page.content()
    reader = visitor("/ui/login", is_let_in=False)
    reader.get_by_label("Token").fill(text)
    reader.get_by_role("button", name="Log in").click()
    expect(reader.get_by_role("link", name="Tasks", exact=True)).to_be_visible()
    expect(reader.get_by_role("link", name="Settings", exact=True)).to_have_count(0)
    reader.goto(live.url("/ui/tasks"))
    expect(reader.get_by_role("link", name="Cancel…")).to_have_count(0)
    row = page.locator("#all-tokens tr", has_text="a reader")
    row.locator("summary", has_text="Revoke").click()
    row.get_by_role("button", name="Revoke it").click()
    was_done(page, "a reader is revoked")
    reader.goto(live.url("/ui/tasks"))
    expect(reader.get_by_label("Token")).to_be_visible()
