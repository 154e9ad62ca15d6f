"""One task: watched while it runs, cancelled, tried again, and why another waits."""

from __future__ import annotations

import json
import re

from playwright.sync_api import expect

from browser.live_service import Live
from browser.visiting import Visitor, was_done
from browser.watching import Watch
from service.support import Gate, wait_until


def test_a_task_is_watched_from_its_start_to_its_webhook(
    visitor: Visitor, live: Live, gate: Gate
) -> None:
    gate.params["answer"] = {"said": "the answer of the work"}
    callback = f"{live.receiver.url}/watched"
    task = live.service.submit(params=gate.params, callbackUrl=callback, estimate={"tokens": 400})
    page = visitor(f"/ui/tasks/{task}")
    state = page.locator(".head .state")
    expect(state).to_contain_text("running")
    gate.open()
    expect(state).to_contain_text("done")
    result = page.get_by_role("region", name="Result")
    expect(result).to_contain_text("the answer of the work")
    wait_until(lambda: live.receiver.at("/watched"), seconds=40)
    page.reload()
    expect(page.locator(".timeline")).to_contain_text("ebhook")
    page.get_by_role("link", name="Raw JSON", exact=True).click()
    assert json.loads(page.locator("body").inner_text())["taskId"] == task


def test_a_running_task_is_cancelled_and_tried_again(
    visitor: Visitor, live: Live, gate: Gate
) -> None:
    task = live.service.submit(params=gate.params)
    page = visitor(f"/ui/tasks/{task}")
    expect(page.locator(".head .state")).to_contain_text("running")
    page.locator("summary", has_text="Cancel").click()
    page.get_by_role("button", name="Cancel the task").click()
    was_done(page)
    expect(page.locator(".head .state")).to_contain_text("cancelled")
    live.service.wait_for(task, "cancelled")
    page.locator("summary", has_text="Retry").click()
    page.get_by_role("button", name="Submit it again").click()
    was_done(page)
    expect(page.locator(".head .state")).to_contain_text("running")
    again = page.url.rsplit("/", 1)[1]
    assert again != task
    assert page.get_by_role("link", name=task).count() > 0, "it leads back to the first"


def test_why_a_task_waits_leads_to_what_holds_it(visitor: Visitor, live: Live, gate: Gate) -> None:
    holder = live.service.submit(projectId="narrow", agentId="narrow-1", params=gate.params)
    live.service.wait_for(holder, "running")
    waiting = live.service.submit(projectId="narrow", agentId="narrow-2", params=gate.params)
    after = live.service.submit(projectId="search", dependsOn=[waiting])
    page = visitor(f"/ui/tasks/{after}")
    expect(page.get_by_role("heading", name="Why it waits")).to_be_visible()
    page.locator(".reasons").get_by_role("link", name=waiting).click()
    expect(page).to_have_url(live.url(f"/ui/tasks/{waiting}"))
    reasons = page.locator(".reasons")
    expect(reasons).to_contain_text("narrow")
    reasons.get_by_role("link", name=holder).click()
    expect(page).to_have_url(live.url(f"/ui/tasks/{holder}"))
    expect(page.locator(".head .state")).to_contain_text("running")
    page.goto(live.url(f"/ui/tasks/{waiting}"))
    gate.open()
    expect(page.locator(".head .state")).to_contain_text("done")
    expect(page.get_by_role("heading", name="Why it waits")).to_have_count(0)
    live.service.wait_for(after, "done")


def test_a_failed_task_shows_its_error_and_its_attempts(visitor: Visitor, live: Live) -> None:
    task = live.service.submit(params={"error": "the disk is full"}, maxAttempts=2)
    live.service.wait_for(task, "failed")
    page = visitor(f"/ui/tasks/{task}")
    expect(page.get_by_role("heading", name="Error")).to_be_visible()
    expect(page.locator("#error-text")).to_contain_text("the disk is full")
    expect(page.get_by_text("no retry: no more than 2 may fail")).to_be_visible()


def test_the_curl_line_is_copied_without_the_token(visitor: Visitor, live: Live) -> None:
    task = live.service.submit(agentId="curled", action="same again")
    live.service.wait_for(task)
    page = visitor(f"/ui/tasks/{task}", permissions=["clipboard-read", "clipboard-write"])
    page.locator("#again ~ p").get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    line = page.evaluate("navigator.clipboard.readText()")
    assert re.match(r"curl ", line)
    assert "same again" in line
    assert live.service.token not in line


def test_a_task_that_is_not_there_says_so(visitor: Visitor, watch: Watch) -> None:
    watch.expect("status of 404")
    page = visitor("/ui/tasks/tsk_00000000000000000000000000")
    expect(page.get_by_role("heading", level=1)).to_contain_text("not found")
    page.get_by_role("link", name="Go to the overview").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_attached()
