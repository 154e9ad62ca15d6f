"""Who a request is: by its token, its path and its headers, in this order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.api.errors import ApiError
from headgate.core.estimates import Reserve
from headgate.gateway.identity import (
    ClientKeys,
    Identity,
    Path,
    RequestHeaders,
    client_of,
    identify,
    is_headgate_token,
    keys_of,
    session_of,
    split_prefix,
)
from headgate.gateway.protocols import upstream_headers
from headgate.storage.tokens import UNBOUND, Bounds

TOKEN = "hg_0123456789ab_" + "5" * 40
PROJECTS = {"default", "evals", "a b/c", "ü"}


def headers(**values: str) -> RequestHeaders:
    return RequestHeaders(
        [(name.replace("_", "-").encode(), value.encode()) for name, value in values.items()]
    )


PATHS = [
    ("/v1/messages", Path(None, None, "/v1/messages")),
    ("/", Path(None, None, "/")),
    ("/p", Path(None, None, "/p")),
    ("/projects/x", Path(None, None, "/projects/x")),
    ("/p/evals/v1/messages", Path("evals", None, "/v1/messages")),
    ("/p/evals/nightly/v1/messages", Path("evals", "nightly", "/v1/messages")),
    ("/p/evals", Path("evals", None, "/")),
    ("/p/evals/", Path("evals", None, "/")),
    ("/p/evals/api/hello", Path("evals", None, "/api/hello")),
    ("/p/evals/nightly", Path("evals", "nightly", "/")),
    ("/p/evals/nightly/api/hello", Path("evals", "nightly", "/api/hello")),
    ("/p/evals/v1", Path("evals", None, "/v1")),
    ("/p/a%20b%2Fc/%C3%BC/v1/models", Path("a b/c", "ü", "/v1/models")),
    ("/p//v1/models", Path("", None, "/v1/models")),
    ("/p/evals/nightly/v1/responses/r%2F1", Path("evals", "nightly", "/v1/responses/r%2F1")),
]


@pytest.mark.parametrize(("path", "split"), PATHS)
def test_a_prefix_names_project_and_agent(path: str, split: Path) -> None:
    assert split_prefix(path) == split


def test_a_prefix_that_cannot_be_decoded_is_not_found() -> None:
    with pytest.raises(ApiError, match="decoded"):
        split_prefix("/p/%FF/v1/models")


CLIENTS = [
    ("claude-cli/2.0.14 (external, cli)", "claude-code"),
    ("codex_cli_rs/0.58.0 (Debian 13; x86_64) unknown", "codex"),
    ("codex_exec/0.58.0 (Debian)", "codex"),
    ("opencode/1.0.55 ai-sdk/provider-utils/3.0.9 runtime/bun", "opencode"),
    ("OpenAI/Python 3.49.0", "openai-python"),
    ("AsyncOpenAI/Python 3.49.0", "openai-python"),
    ("Anthropic/Python 2.8.0", "anthropic-python"),
    ("AsyncAnthropic/Python 2.8.0", "anthropic-python"),
    ("OpenAI/JS 6.1.0", "openai-node"),
    ("Anthropic/JS 0.60.0", "anthropic-node"),
    ("langchain-openai/1.0", "langchain"),
    ("ai-sdk/openai-compatible/1.0", "ai-sdk"),
    ("curl/8.5.0", "curl"),
    ("something else", "api"),
    ("", "api"),
]


@pytest.mark.parametrize(("user_agent", "client"), CLIENTS)
def test_a_client_is_known_by_its_user_agent(user_agent: str, client: str) -> None:
    assert client_of(headers(user_agent=user_agent)) == client


def test_codex_is_known_by_its_origin_too() -> None:
    assert client_of(headers(user_agent="reqwest/0.12", originator="codex_exec")) == "codex"


def test_a_session_is_what_the_client_calls_it() -> None:
    by_header = session_of(headers(x_claude_code_session_id="s1"), cache_key="k", prefix_hash="h")
    assert by_header == session_of(headers(session_id="s1", x_session_affinity="a"))
    assert session_of(headers(), cache_key="k") == session_of(
        headers(x_session_affinity="a"), cache_key="k", prefix_hash="h"
    )
    distinct = [
        by_header,
        session_of(headers(), cache_key="k"),
        session_of(headers(x_session_affinity="a")),
        session_of(headers(), prefix_hash="h"),
        session_of(headers(), cache_key="s1"),
        session_of(headers()),
    ]
    assert len(set(distinct)) == len(distinct)
    assert distinct[-1] == ""
    assert all(len(one) == 16 for one in distinct[:-1])


KEYS = [
    ({"authorization": "Bearer sk-1"}, ClientKeys(provider_key="sk-1")),
    ({"authorization": "bearer  sk-1 "}, ClientKeys(provider_key="sk-1")),
    ({"x_api_key": "sk-2"}, ClientKeys(provider_key="sk-2", scheme="x-api-key")),
    ({"authorization": f"Bearer {TOKEN}"}, ClientKeys(token=TOKEN)),
    ({"x_api_key": TOKEN}, ClientKeys(token=TOKEN)),
    ({"x_api_key": "hg_wrong"}, ClientKeys(token="hg_wrong")),
    ({"x_api_key": "HG_wrong"}, ClientKeys(token="HG_wrong")),
    (
        {"authorization": f"Bearer {TOKEN}", "x_api_key": "sk-2"},
        ClientKeys(token=TOKEN, provider_key="sk-2", scheme="x-api-key"),
    ),
    (
        {"authorization": "Bearer sk-1", "x_api_key": TOKEN},
        ClientKeys(token=TOKEN, provider_key="sk-1"),
    ),
    ({"authorization": "Basic dXNlcjpwYXNz"}, ClientKeys()),
    ({"authorization": "Bearer two words"}, ClientKeys()),
    ({}, ClientKeys()),
]


@pytest.mark.parametrize(("given_headers", "keys"), KEYS)
def test_tokens_and_keys_are_told_apart(given_headers: dict[str, str], keys: ClientKeys) -> None:
    assert keys_of(headers(**given_headers)) == keys


@given(st.sampled_from(["", '"', " ", "'", "Token "]), st.text("0123456789abcdef_", max_size=30))
def test_nothing_that_begins_as_a_token_is_a_providers_key(before: str, rest: str) -> None:
    text = f"{before}hg_{rest}" if before != "Token " else f"{before}{TOKEN}{rest}"
    assert is_headgate_token(text)
    for name in ("authorization", "x_api_key"):
        value = f"Bearer {text}" if name == "authorization" else text
        assert keys_of(headers(**{name: value})).provider_key == ""


def test_a_key_that_has_the_letters_inside_is_a_key() -> None:
    assert not is_headgate_token("sk-abchg_0123")


def test_keys_do_not_show_themselves() -> None:
    shown = repr(ClientKeys(token=TOKEN, provider_key="sk-canary"))
    assert "canary" not in shown
    assert "hg_" not in shown


def identity(path: str = "/v1/messages", bounds: Bounds = UNBOUND, **values: str) -> Identity:
    return identify(
        split_prefix(path),
        headers(**values),
        bounds=bounds,
        knows_project=PROJECTS.__contains__,
    )


EVALS = Bounds(project_id="evals")
NIGHTLY = Bounds(project_id="evals", agent_id="nightly")
WHO: list[tuple[Identity, str, str]] = [
    (identity(), "default", "api"),
    (identity(user_agent="claude-cli/2"), "default", "claude-code"),
    (identity("/p/evals/v1/messages", user_agent="claude-cli/2"), "evals", "claude-code"),
    (identity("/p/evals/nightly/v1/messages"), "evals", "nightly"),
    (identity(x_headgate_project="evals", x_headgate_agent="a"), "evals", "a"),
    (identity("/p/evals/b/v1/x", x_headgate_project="ü", x_headgate_agent="a"), "evals", "b"),
    (identity("/p/a%20b%2Fc/%C3%BC/v1/models"), "a b/c", "ü"),
    (identity(bounds=EVALS, user_agent="curl/8"), "evals", "curl"),
    (identity(bounds=NIGHTLY), "evals", "nightly"),
    (identity("/p/evals/nightly/v1/x", bounds=NIGHTLY), "evals", "nightly"),
    (identity("/p/evals/any/v1/x", bounds=EVALS), "evals", "any"),
]


@pytest.mark.parametrize(("who", "project_id", "agent_id"), WHO)
def test_the_token_says_first_then_the_path_then_the_headers(
    who: Identity, project_id: str, agent_id: str
) -> None:
    assert (who.project_id, who.agent_id) == (project_id, agent_id)
    assert who.scopes[0] == f"project:{project_id}"


REFUSED: list[tuple[str, dict[str, str], Bounds, str]] = [
    ("/p/default/v1/x", {}, EVALS, "forbidden"),
    ("/p/evals/other/v1/x", {}, NIGHTLY, "forbidden"),
    ("/v1/x", {"x_headgate_project": "default"}, EVALS, "forbidden"),
    ("/v1/x", {"x_headgate_agent": "other"}, NIGHTLY, "forbidden"),
    ("/v1/x", {"x_headgate_scope": "team:red"}, EVALS, "forbidden"),
    ("/v1/x", {"x_headgate_priority": "-1"}, Bounds(least_priority=0), "forbidden"),
    ("/p/nowhere/v1/x", {}, UNBOUND, "unknown_project"),
    ("/p//v1/x", {}, UNBOUND, "invalid_field"),
    ("/p/evals/built-in/v1/x", {}, UNBOUND, "invalid_field"),
    ("/p/evals/" + "a" * 200 + "/v1/x", {}, UNBOUND, "invalid_field"),
    ("/p/evals/a%0Ab/v1/x", {}, UNBOUND, "invalid_field"),
    ("/v1/x", {"x_headgate_scope": "no scope"}, UNBOUND, "invalid_field"),
    ("/v1/x", {"x_headgate_scope": "project:evals"}, UNBOUND, "invalid_field"),
    ("/v1/x", {"x_headgate_priority": "high"}, UNBOUND, "invalid_field"),
    ("/v1/x", {"x_headgate_priority": "9" * 18}, UNBOUND, "invalid_field"),
    ("/v1/x", {"x_headgate_reserve": "some"}, UNBOUND, "invalid_field"),
]


@pytest.mark.parametrize(("path", "values", "bounds", "code"), REFUSED)
def test_what_contradicts_the_token_or_is_no_name_is_refused(
    path: str, values: dict[str, str], bounds: Bounds, code: str
) -> None:
    with pytest.raises(ApiError) as caught:
        identity(path, bounds, **values)
    assert caught.value.body.code == code


def test_scopes_priority_and_reserve_come_in_headers() -> None:
    who = identity(
        x_headgate_scope="team:red/user:ann, session:s1,",
        x_headgate_priority="-5",
        x_headgate_reserve="Strict",
    )
    assert who.scopes == ("project:default", "team:red/user:ann", "session:s1")
    assert (who.priority, who.reserve) == (-5, Reserve.STRICT)


@pytest.mark.parametrize(
    ("least", "said", "priority"), [(None, "", 0), (3, "", 3), (-3, "", 0), (3, "4", 4)]
)
def test_a_token_has_a_most_urgent_priority(least: int | None, said: str, priority: int) -> None:
    assert identity(bounds=Bounds(least_priority=least), x_headgate_priority=said).priority == (
        priority
    )


def test_a_bound_token_charges_what_is_its_own() -> None:
    who = identity(bounds=EVALS, x_headgate_scope="project:evals/session:s1")
    assert who.scopes == ("project:evals", "project:evals/session:s1")


@pytest.mark.parametrize(
    ("bounds", "said", "scopes"),
    [
        (NIGHTLY, "", ("project:evals", "project:evals/agent:nightly")),
        (
            *(NIGHTLY, "project:evals/agent:nightly/run:1"),
            (
                "project:evals",
                "project:evals/agent:nightly",
                "project:evals/agent:nightly/run:1",
            ),
        ),
        (Bounds(agent_id="nightly"), "", ("project:default", "agent:nightly")),
        (EVALS, "", ("project:evals",)),
        (Bounds(agent_id="no/scope"), "", ("project:default",)),
    ],
)
def test_a_token_of_an_agent_charges_its_own_budget_unasked(
    bounds: Bounds, said: str, scopes: tuple[str, ...]
) -> None:
    values = {"x_headgate_scope": said} if said else {}
    assert identity(bounds=bounds, **values).scopes == scopes


def test_no_header_of_ours_goes_upstream() -> None:
    own = [(b"x-headgate-project", b"evals"), (b"authorization", b"Bearer " + TOKEN.encode())]
    assert upstream_headers(own) == [(b"accept-encoding", b"identity")]
