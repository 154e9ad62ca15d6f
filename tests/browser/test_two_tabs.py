"""Two tabs of one browser: what was done in one is said there, whichever loads a page first."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from browser.live_service import Live
from browser.visiting import Visitor, was_done

SENT = "form[action='/ui/projects/{name}/change']"
# Sends a form of the page as a click does, and does not go where it leads yet.
SEND = """async (form) => {
  const body = new URLSearchParams(new FormData(form));
  const answer = await fetch(form.action, {method: "POST", body, redirect: "manual"});
  return answer.type;
}"""


def change_weight(page: Page, live: Live, name: str, weight: str) -> None:
    """Have a project changed, by a page that waits before it shows what came of it."""
    page.goto(live.url(f"/ui/projects/{name}"))
    form = page.locator(SENT.format(name=name), has=page.get_by_label("Weight"))
    form.get_by_label("Weight").fill(weight)
    assert form.evaluate(SEND) == "opaqueredirect"


def test_what_was_done_in_one_tab_is_not_said_in_another(visitor: Visitor, live: Live) -> None:
    first = visitor(None)
    second = first.context.new_page()
    change_weight(first, live, "first-tab", "2")
    said = second.locator("main > .flash")
    for path in ("/", "/ui/projects", "/ui/projects/second-tab"):
        second.goto(live.url(path))
        expect(second.get_by_role("heading", level=1)).to_be_attached()
        expect(said).to_have_count(0)
    change_weight(second, live, "second-tab", "4")
    assert "said" not in second.evaluate("document.cookie"), "no script reads what was said"
    for page, name in ((first, "first-tab"), (second, "second-tab")):
        page.goto(live.url(f"/ui/projects/{name}"))
        was_done(page, f"project {name} was changed")
        page.reload()
        expect(page.locator("main > .flash")).to_have_count(0)
