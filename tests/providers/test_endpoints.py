"""Where a provider is asked: the defaults, and which endpoints are refused, with one clear line."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from headgate.errors import InvalidSettingError
from headgate.providers.endpoints import ProviderEndpoint, check_endpoint
from headgate.providers.provider import build_provider


def endpoint(**fields: object) -> ProviderEndpoint:
    return msgspec.convert(fields, ProviderEndpoint)


@pytest.mark.parametrize(
    ("name", "quota_url", "request_url"),
    [
        (
            "zai",
            "https://api.z.ai/api/monitor/usage/quota/limit",
            "https://api.z.ai/api/coding/paas/v4/chat/completions",
        ),
        ("anthropic", None, "https://api.anthropic.com/v1/messages"),
        ("openai", None, "https://api.openai.com/v1/chat/completions"),
    ],
)
def test_defaults_are_filled_in(name: str, quota_url: str | None, request_url: str) -> None:
    found = endpoint().with_defaults(name)
    assert (found.quota_url, found.request_url) == (quota_url, request_url)
    assert found.model
    assert found.zone is not None


def test_an_address_of_ones_own_goes_before_the_default_path() -> None:
    found = endpoint(base_url="http://127.0.0.1:7430/").with_defaults("zai")
    assert found.quota_url == "http://127.0.0.1:7430/api/monitor/usage/quota/limit"
    own = endpoint(quota_url="https://a/q", request_url="https://a/r", model="m").with_defaults(
        "zai"
    )
    assert (own.quota_url, own.request_url, own.model) == ("https://a/q", "https://a/r", "m")
    assert msgspec.json.decode(own.wake_content())["model"] == "m"


GOOD_JSON: dict[str, object] = {"quota_url": "https://a/q", "percent_pointer": "/p"}
WRONG: list[tuple[str, dict[str, object], str, str]] = [
    ("zai", {"base_url": "ftp://a"}, "base_url", "http://"),
    ("zai", {"base_url": "https://"}, "base_url", "http://"),
    ("zai", {"base_url": "https://a:99999"}, "base_url", "http://"),
    ("zai", {"quota_url": "https://a/ b"}, "quota_url", "http://"),
    ("zai", {"request_url": "https://[::1"}, "request_url", "http://"),
    ("zai", {"headers": {"a b": "c"}}, "headers.a b", "is not the name"),
    ("zai", {"headers": {"Host": "c"}}, "headers.Host", "leave it out"),
    ("zai", {"headers": {"x": "a\nb"}}, "headers.x", "printable ASCII"),
    ("zai", {"wake_body": "{"}, "wake_body", "is not JSON"),
    ("zai", {"percent_pointer": "/a"}, "percent_pointer", "leave it out"),
    ("nobody", {}, "provider", "must be one of zai, anthropic, openai, http-json"),
    ("http-json", {}, "quota_url", "needs the address"),
    ("http-json", {"quota_url": "https://a"}, "percent_pointer", "either this or used_pointer"),
    ("http-json", {**GOOD_JSON, "used_pointer": "/u"}, "percent_pointer", "either this"),
    ("http-json", {**GOOD_JSON, "limit_pointer": "/l"}, "limit_pointer", "needs used_pointer"),
    ("http-json", {**GOOD_JSON, "reset_pointer": "r"}, "reset_pointer", "JSON pointer"),
]


@pytest.mark.parametrize(("name", "fields", "field", "problem"), WRONG)
def test_an_endpoint_that_cannot_be_used_is_refused_by_its_field(
    name: str, fields: dict[str, object], field: str, problem: str
) -> None:
    with pytest.raises(InvalidSettingError) as refused:
        build_provider(name, endpoint(**fields), setting="slots.work")
    assert f"slots.work.{field}" in str(refused.value)
    assert problem in str(refused.value)


def test_a_wake_of_any_address_needs_a_request_and_a_body() -> None:
    check_endpoint("http-json", endpoint(**GOOD_JSON))
    with pytest.raises(InvalidSettingError, match="request_url"):
        check_endpoint("http-json", endpoint(**GOOD_JSON), wakes=True)
    with pytest.raises(InvalidSettingError, match="wake_body"):
        check_endpoint("http-json", endpoint(**GOOD_JSON, request_url="https://a"), wakes=True)
    for more in ({"wake_body": "{}"}, {"model": "m"}):
        fields = {**GOOD_JSON, **more, "request_url": "https://a"}
        check_endpoint("http-json", endpoint(**fields), wakes=True)


def test_checking_an_endpoint_loads_no_http_client() -> None:
    program = (
        "import sys; from headgate.providers.endpoints import check_endpoint, ProviderEndpoint;"
        "check_endpoint('zai', ProviderEndpoint()); assert 'httpx2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
