"""URLs that tasks fill: whatever a task says, it stays where it was put."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

import httpx2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executors.orders import order, raw
from headgate.errors import InvalidSettingError
from headgate.executors.executor import WorkOrder
from headgate.executors.templates import Environment, UnfilledError, UrlTemplate

texts = st.text(min_size=1, max_size=30) | st.sampled_from(
    ["..", ".", "../x", "..%2fx", "//evil", "@evil", ":80", "?a=b", "#x", "\\..\\", "%2e%2e", "a b"]
)


def template(text: str, **variables: str) -> UrlTemplate:
    return UrlTemplate(text, setting="targets.it.url", environment=Environment(variables))


def order_of(tab_id: str | None = None, params: object = None) -> WorkOrder:
    return order(tab_id=tab_id, params=params)


@settings(deadline=None)
@given(tab_id=texts, name=texts)
def test_what_a_task_says_is_one_part_of_the_path_and_one_of_the_query(
    tab_id: str, name: str
) -> None:
    url = template("http://host:8080/tabs/{tabId}/action?name={params.name}")
    try:
        filled = url.fill(order_of(tab_id, {"name": name}))
    except UnfilledError:
        assert tab_id in {".", ".."}
        return
    parts = urlsplit(filled)
    assert (parts.scheme, parts.netloc, parts.fragment) == ("http", "host:8080", "")
    empty, tabs, tab, action = parts.path.split("/")
    assert (empty, tabs, action) == ("", "tabs", "action")
    assert unquote(tab) == tab_id
    assert unquote(parts.query.removeprefix("name=")) == name
    sent = httpx2.URL(filled)
    assert (sent.host, sent.port) == ("host", 8080)
    assert sent.raw_path.decode() == f"{parts.path}?{parts.query}"


@settings(deadline=None)
@given(first=texts, second=texts)
def test_values_side_by_side_make_no_step_up_the_path(first: str, second: str) -> None:
    url = template("http://host/a/{tabId}{params.b}/c")
    try:
        filled = url.fill(order_of(first, {"b": second}))
    except UnfilledError:
        assert first + second in {".", ".."}
        return
    assert httpx2.URL(filled).path.startswith("/a/")
    assert httpx2.URL(filled).path.endswith("/c")


VALUES: list[tuple[object, str]] = [
    ("a b", "a%20b"),
    (5, "5"),
    (-1.5, "-1.5"),
    (True, "true"),
    (False, "false"),
    ("ü/", "%C3%BC%2F"),
    (10**30, "1" + "0" * 30),
]


@pytest.mark.parametrize(("value", "written"), VALUES)
def test_texts_and_numbers_can_be_part_of_a_url(value: object, written: str) -> None:
    assert (
        template("http://h/{params.v}").fill(order_of(params={"v": value})) == f"http://h/{written}"
    )


UNUSABLE: list[tuple[object, str]] = [
    (None, "params.v is required for task execution"),
    ({}, "params.v is required for task execution"),
    ({"v": None}, "params.v is required for task execution"),
    ({"v": ""}, "params.v is required for task execution"),
    ({"v": [1]}, "params.v must be a string or a number to be part of a URL"),
    ({"v": {"a": 1}}, "params.v must be a string or a number to be part of a URL"),
    ([1], "params must be a JSON object"),
]


@pytest.mark.parametrize(("params", "error"), UNUSABLE)
def test_what_cannot_be_part_of_a_url_is_an_error(params: object, error: str) -> None:
    with pytest.raises(UnfilledError) as raised:
        template("http://h/{params.v}").fill(order_of(params=params))
    assert str(raised.value) == error


def test_params_that_are_broken_are_an_error() -> None:
    broken = msgspec.structs.replace(order_of().submission, params=msgspec.Raw(b'{"v": 1e999}'))
    with pytest.raises(UnfilledError, match="JSON object"):
        template("http://h/{params.v}").fill(msgspec.structs.replace(order_of(), submission=broken))


def test_every_field_of_a_task_can_be_part_of_a_url() -> None:
    url = template("http://h/{projectId}/{agentId}/{taskId}/{action}/{tabId}/{params.a-b c}")
    filled = url.fill(order_of("t", {"a-b c": "p"}))
    assert filled == "http://h/search/coder/t-1/click/t/p"


def test_the_environment_may_hold_the_whole_address() -> None:
    url = template("{env.BASE}/x/{tabId}", BASE="https://user.test:1/api")
    assert url.fill(order_of("t")) == "https://user.test:1/api/x/t"


def test_a_place_in_a_variable_is_not_filled() -> None:
    with pytest.raises(InvalidSettingError, match="brace"):
        template("{env.BASE}/x", BASE="https://user.test/{tabId}")


@pytest.mark.parametrize("address", ["http://[::1]:80", "http://h", "HTTPS://h.test.", "http://ü"])
def test_addresses_of_all_forms_are_taken(address: str) -> None:
    assert template(f"{address}/{{tabId}}").fill(order_of("t")) == f"{address}/t"


def test_a_longer_secret_is_hidden_before_one_that_it_contains() -> None:
    environment = Environment({"SHORT": "abcd", "LONG": "abcdefgh", "TINY": "a"})
    for name in ("SHORT", "LONG", "TINY"):
        environment.value(name, setting="x")
    assert environment.cleaned("abcdefgh abcd a") == "{env.LONG} {env.SHORT} a"
    assert "abcd" not in repr(environment)


def test_raw_json_is_kept_unread() -> None:
    assert bytes(raw({"a": 1})) == b'{"a":1}'


@pytest.mark.parametrize("length", [40_000, 1_000_000])
def test_a_filled_url_has_a_limit_whatever_the_params_have(length: int) -> None:
    url = template("http://h/{params.v}/{params.v}")
    with pytest.raises(UnfilledError, match="longer than 65,536 characters"):
        url.fill(order_of(params={"v": "x" * length}))
