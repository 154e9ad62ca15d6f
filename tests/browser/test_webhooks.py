"""Webhooks: filtered, read, sent again, pinged, and a new secret."""

from __future__ import annotations

from playwright.sync_api import expect

from browser.live_service import Live
from browser.visiting import Visitor, was_done
from service.support import wait_until


def tries_of(live: Live, task: str) -> int:
    """Return how often the receiver that is gone was told of a task."""
    came = live.receiver.at("/gone")
    return sum(one.headers["x-headgate-task-id"] == task for one in came)


def test_a_webhook_that_was_given_up_is_found_and_sent_again(visitor: Visitor, live: Live) -> None:
    task = live.service.submit(callbackUrl=f"{live.receiver.url}/gone")
    live.service.wait_for(task)
    wait_until(lambda: tries_of(live, task) == 1, seconds=40)
    page = visitor(f"/ui/webhooks?task={task}")
    expect(page.locator("#deliveries")).to_contain_text("given up")
    page.get_by_label("State").select_option("delivered")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_text("No webhook matches")).to_be_visible()
    page.go_back()
    page.locator("#deliveries th a").click()
    expect(page.locator("#delivery")).to_contain_text("410")
    page.get_by_role("button", name="Send again").click()
    was_done(page, "sends the webhook again")
    wait_until(lambda: tries_of(live, task) == 2, seconds=40)
    expect(page.locator("#delivery")).to_contain_text("given up")
    page.locator("#delivery").get_by_role("link", name=task).click()
    expect(page).to_have_url(live.url(f"/ui/tasks/{task}"))


def test_one_that_arrived_is_asked_about_before_it_is_sent_again(
    visitor: Visitor, live: Live
) -> None:
    task = live.service.submit(callbackUrl=f"{live.receiver.url}/taken?secret=hidden")
    page = visitor(f"/ui/webhooks?task={task}")
    row = page.locator("#deliveries tbody tr")
    expect(row).to_contain_text("delivered")
    expect(row).not_to_contain_text("secret=hidden")
    row.locator("summary", has_text="Send again").click()
    row.get_by_role("button", name="Send it again").click()
    was_done(page, "sends the webhook again")
    wait_until(lambda: len(live.receiver.at("/taken?secret=hidden")) == 2, seconds=40)


def test_an_address_is_tried_and_its_answer_told(visitor: Visitor, live: Live) -> None:
    page = visitor("/ui/webhooks")
    for path, said in (("/ping", "accepted the message"), ("/gone", "did not take the message")):
        page.get_by_role("textbox", name="Address").fill(f"{live.receiver.url}{path}")
        page.get_by_role("button", name="Send a ping").click()
        expect(page.locator("main > .flash")).to_contain_text(said)


def test_a_new_secret_is_made_and_its_text_stays_hidden(visitor: Visitor, live: Live) -> None:
    page = visitor("/ui/webhooks")
    page.locator("summary", has_text="New secret").click()
    page.get_by_role("button", name="Create a new secret").click()
    was_done(page, "new signing secret")
    expect(page.get_by_role("rowheader", name="replaced")).to_be_visible()
    assert "whsec_" not in page.content()
