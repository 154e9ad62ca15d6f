"""Who gets in, by which cookie, and that no other page can act for them."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from api.asgi_client import answer_of
from dashboard.browser import Browser, serving, submit, text_of
from headgate.app import Service
from headgate.dashboard.login import MAX_TRIES, TRIES_SECONDS, Tries
from headgate.dashboard.session import local_path
from headgate.storage.tokens import PERMISSIONS, UNBOUND, Bounds, Permission, new_token

LOCKED = "[auth]\nrequired = true\n"


async def token_of(
    service: Service, *permissions: Permission, bounds: Bounds = UNBOUND, name: str = ""
) -> str:
    """Make a token of a service that runs."""
    new = new_token(
        name=name or secrets.token_hex(4),
        permissions=permissions or PERMISSIONS,
        now=service.engine.now(),
        bounds=bounds,
        expires_at=None,
    )
    await service.api.tokens.add(new.kept)
    return new.text


async def test_whoever_has_no_token_is_sent_to_the_login_and_back(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        answer = await browser.get("/ui/tasks?state=queued")
        assert answer.status == 303
        login = answer.headers["location"]
        assert login == "/ui/login?next=/ui/tasks%3Fstate%3Dqueued"
        form = await browser.get(login)
        assert 'name="next" value="/ui/tasks?state=queued"' in form.body.decode()
        fields = {"token": await token_of(service), "next": "/ui/tasks?state=queued"}
        answer = await browser.post("/ui/login", fields)
        assert (answer.status, answer.headers["location"]) == (303, "/ui/tasks?state=queued")
        assert (await browser.get("/ui/tasks")).status == 200


async def test_a_region_of_a_page_whose_login_has_ended_leads_the_page_there(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, LOCKED) as (_, app):
        answer = await Browser(app).region("/", "state-now")
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["hx-redirect"] == "/ui/login"


async def test_no_script_and_no_other_site_gets_at_the_cookies(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        await browser.get("/ui/login")
        (secret,) = browser.set_cookies
        await browser.post("/ui/login", {"token": await token_of(service)})
        (token,) = browser.set_cookies
        for line in (secret, token):
            assert line.split("; ")[1:] == ["Path=/", "SameSite=Strict", "HttpOnly"]


async def test_a_wrong_token_says_so_and_opens_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/login")
        for wrong in ("", "hg_x", "h\u00e4\r\nSet-Cookie: a=b", f"hg_{'0' * 12}_{'0' * 48}"):
            answer = await browser.post("/ui/login", {"token": wrong, "next": "/ui/slots"})
            assert answer.status == 401
            assert "This service does not recognise that token." in text_of(answer.body)
            assert 'value="/ui/slots"' in answer.body.decode()
            assert "headgate_token" not in browser.cookies
        assert (await browser.get("/")).status == 303


async def test_a_token_that_may_not_read_is_told_so_at_the_login(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        await browser.get("/ui/login")
        answer = await browser.post("/ui/login", {"token": await token_of(service, "submit")})
    assert "needs the permission read" in text_of(answer.body)


async def test_wrong_tokens_are_tried_a_few_times_a_minute(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        await browser.get("/ui/login")
        for _ in range(MAX_TRIES):
            assert (await browser.post("/ui/login", {"token": "hg_x"})).status == 401
        answer = await browser.post("/ui/login", {"token": "hg_x"})
        right = await browser.post("/ui/login", {"token": await token_of(service)})
    assert answer.status == 429
    assert "In a minute Headgate" in text_of(answer.body)
    assert right.status == 303, "whoever else came from this address, as all of a proxy do"


def test_the_tries_of_one_address_are_forgotten_after_a_minute_and_are_its_own() -> None:
    clock = [0.0]
    tries = Tries(lambda: clock[0])
    for _ in range(MAX_TRIES):
        tries.note("10.0.0.1")
    assert tries.are_used_up("10.0.0.1")
    assert not tries.are_used_up("10.0.0.2")
    clock[0] = TRIES_SECONDS + 1
    assert not tries.are_used_up("10.0.0.1")


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/ui/tasks?state=queued&limit=5", "/ui/tasks?state=queued&limit=5"),
        ("", "/"),
        ("ui/tasks", "/"),
        ("//evil.example/", "/"),
        ("/\\evil.example/", "/"),
        ("/ui\\..\\evil", "/"),
        ("https://evil.example/", "/"),
        ("javascript:alert(1)", "/"),
        ("/a\r\nSet-Cookie: b=c", "/"),
        ("/\t/evil.example", "/"),
        ("/" + "a" * 3_000, "/"),
        ("/ui/logout", "/"),
        ("/ui/theme?next=/ui/tasks", "/"),
    ],
)
def test_a_login_leads_to_a_page_of_this_service_only(given: str, path: str) -> None:
    assert local_path(given) == path


async def test_the_page_after_a_login_cannot_be_on_another_host(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        form = await browser.get("/ui/login?next=//evil.example/")
        assert "evil" not in form.body.decode()
        fields = {"token": await token_of(service), "next": "//evil.example/"}
        assert (await browser.post("/ui/login", fields)).headers["location"] == "/"


async def test_logging_out_makes_the_browser_forget_the_token(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        await logged_in(browser, await token_of(service))
        answer = await browser.post("/ui/logout")
        assert (answer.status, answer.headers["location"]) == (303, "/ui/login")
        assert "headgate_token" not in browser.cookies
        assert (await browser.get("/")).status == 303


async def logged_in(browser: Browser, token: str) -> None:
    await browser.get("/ui/login")
    answer = await browser.post("/ui/login", {"token": token})
    assert answer.status == 303, text_of(answer.body)


async def test_a_revoked_token_opens_no_page_any_more(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        token = await token_of(service)
        browser = Browser(app)
        await logged_in(browser, token)
        admin = {"authorization": f"Bearer {await token_of(service)}"}
        path = f"/tokens/{token.split('_')[1]}"
        assert (await answer_of(app, "DELETE", path, headers=admin)).status == 200
        assert (await browser.get("/")).status == 303


async def test_the_api_does_not_look_at_the_cookie(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        headers = {"cookie": f"headgate_token={await token_of(service)}"}
        for method, path in (("GET", "/tasks"), ("POST", "/tasks"), ("GET", "/events")):
            answer = await answer_of(app, method, path, b"{}", headers=headers)
            assert answer.problem["code"] == "unauthorized"


async def test_a_page_does_not_take_the_header_of_the_api(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        headers = {"authorization": f"Bearer {await token_of(service)}"}
        assert (await answer_of(app, "GET", "/", headers=headers)).status == 303


async def test_where_no_token_is_asked_for_a_foreign_one_locks_nobody_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        browser.cookies["headgate_token"] = "of-another-service-of-this-machine"
        assert (await browser.get("/")).status == 200
        assert (await browser.get("/ui/login")).headers["location"] == "/"


async def test_a_form_without_its_secret_changes_nothing_and_says_what_to_do(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        await browser.get("/")
        for secret in ("", "0" * 32, "\u00e4"):
            answer = await browser.post("/ui/theme", {"theme": "dark", "csrf": secret})
            assert answer.status == 403
            assert "Load the page that has the form again" in text_of(answer.body)
        without_cookie = Browser(app)
        answer = await without_cookie.post("/ui/theme", {"theme": "dark", "csrf": "0" * 32})
        assert answer.status == 403
        answer = await browser.post("/ui/theme", {"theme": "dark", "next": "/ui/slots"})
        assert (answer.status, answer.headers["location"]) == (303, "/ui/slots")
        assert 'data-theme="dark"' in (await browser.get("/")).body.decode()


async def test_the_secret_may_come_in_a_header_as_scripts_send_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        await browser.get("/")
        secret = browser.cookies["headgate_csrf"]
        fields = {"theme": "dark", "csrf": ""}
        answer = await browser.post("/ui/theme", fields, x_csrf_token=secret)
    assert answer.status == 303


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8080"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
async def test_a_form_of_another_site_is_refused_even_with_the_secret(
    headers: dict[str, str], tmp_path: Path
) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        await browser.get("/")
        answer = await browser.post("/ui/theme", {"theme": "dark"}, **headers)
    assert answer.status == 403
    assert browser.set_cookies == []


@pytest.mark.parametrize("said", ["https", "HTTPS", "https, http"])
async def test_a_form_over_https_is_not_taken_from_a_page_that_came_without(
    said: str, tmp_path: Path
) -> None:
    """The first proxy says how the browser came; those between it and the service come after."""
    async with serving(tmp_path) as (_, app):
        browser = Browser(app, scheme="https")
        await browser.get("/")
        for scheme, status in (("https", 303), ("http", 403)):
            headers = {"x_forwarded_proto": said, "origin": f"{scheme}://127.0.0.1:7420"}
            answer = await browser.post("/ui/theme", {"theme": "dark"}, **headers)
            told = text_of(answer.body)
            assert answer.status == status
            assert ("says X-Forwarded-Proto: https of pages" in told) is (scheme == "http")


async def test_a_form_that_is_too_large_is_told_the_limit_of_forms(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        await browser.get("/")
        answer = await browser.post("/ui/theme", {"theme": "x" * 70_000})
    assert answer.status == 413
    assert "The form has more than 64 KiB" in text_of(answer.body)
    assert "1 MiB" not in answer.body.decode()


async def test_a_page_under_a_foreign_name_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        for path in ("/", "/ui/login", "/ui/static/headgate.css", "/ui/live"):
            answer = await Browser(app).get(path, host="evil.example")
            assert answer.status == 421, path
            assert "auth.allowed_hosts" in text_of(answer.body)
            assert "/ui/" not in answer.body.decode(), "nothing more is served under that name"


async def test_a_link_of_another_site_reaches_the_page_by_one_step_more(tmp_path: Path) -> None:
    """The browser keeps the cookie back from such a link, and sends it along the next step."""
    async with serving(tmp_path, LOCKED) as (service, app):
        token = await token_of(service)
        stranger, browser = Browser(app), Browser(app)
        await logged_in(browser, token)
        step = await stranger.get("/ui/login?next=/ui/slots", sec_fetch_site="cross-site")
        assert '<meta http-equiv="refresh" content="0; url=/ui/login?next=' in step.body.decode()
        answer = await browser.get("/ui/login?next=/ui/slots", sec_fetch_site="same-origin")
        assert (answer.status, answer.headers["location"]) == (303, "/ui/slots")
        form = await stranger.get("/ui/login?next=/ui/slots", sec_fetch_site="same-origin")
        assert b'id="token"' in form.body


async def test_whoever_acts_for_one_project_sees_nothing_of_others(tmp_path: Path) -> None:
    toml = LOCKED + "[projects.mine]\n[projects.secret-plan]\n"
    async with serving(tmp_path, toml) as (service, app):
        token = await token_of(service, "read", bounds=Bounds(project_id="mine"))
        admin = {"authorization": f"Bearer {await token_of(service)}"}
        for project in ("mine", "secret-plan"):
            await submit(app, projectId=project, agentId=f"{project}-agent", headers=admin)
        browser = Browser(app)
        await logged_in(browser, token)
        for path in ("/", "/ui/tasks", "/ui/projects", "/ui/budgets"):
            page = await browser.get(path)
            assert page.status == 200
            assert "secret-plan" not in page.body.decode(), path
        first = (await browser.get("/")).body.decode()
        assert (await browser.get("/ui/history")).status == 403
        for path in ("/ui/webhooks", "/ui/settings"):
            assert (await browser.get(path)).status == 403
            assert f'href="{path}"' not in first
