"""`headgate doctor` and the gateway: which upstreams answer to their keys, what has no price."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headgate.cli.doctor_checks import Environment, Finding, gateway_findings, slot_findings
from headgate.config import Settings, load_settings

CANARY = "sk-canary-of-the-upstream-0123456789"
SLOT = '[[slots]]\nname = "work"\nprovider = "zai"\nkey_env = "ZAI_KEY"\n'
ADDRESS = 'base_url = "http://127.0.0.1:1/v1"\n'
HOUSE = '[upstreams.house]\nkind = "openai"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "headgate.toml"


def loaded(file: Path, text: str) -> Settings:
    file.write_text(text)
    return load_settings(file, {}, {})


class _Upstream(BaseHTTPRequestHandler):
    """Answers with the status that its first path segment says."""

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        self.send_response(int(self.path.split("/")[1]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def upstream_server() -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Upstream)
    seen: list[tuple[str, dict[str, str]]] = []
    server.seen = seen  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def findings(
    file: Path, text: str, environ: dict[str, str], service: dict[str, bool] | None = None
) -> list[tuple[str, str, str]]:
    there = Environment(environ, service)
    found: list[Finding] = list(gateway_findings(loaded(file, text), there))
    assert all(one.advice for one in found if one.verdict != "ok")
    assert CANARY not in repr(found)
    return [(one.check, one.verdict, one.found) for one in found]


KEYLESS = [
    ("upstream anthropic", "ok", "has no key: ANTHROPIC_API_KEY is not set in this shell; "),
    ("upstream openai", "ok", "has no key: OPENAI_API_KEY is not set in this shell; "),
]
PASSED = "clients' own keys are passed through on loopback"


def test_the_doctor_says_which_upstreams_have_no_key(file: Path) -> None:
    assert findings(file, "", {}) == [(*one[:2], one[2] + PASSED) for one in KEYLESS]
    always = findings(file, f'[gateway]\npassthrough_keys = "always"\n{HOUSE}', {})
    assert always[0] == (
        "upstream house",
        "ok",
        "has no key; clients' own keys are passed through",
    )
    never = '[gateway]\npassthrough_keys = "never"\n'
    found = findings(file, f"{never}{HOUSE}", {})
    assert [one[:2] for one in found] == [("upstream house", "warn"), *(o[:2] for o in KEYLESS)]
    unset = findings(file, f'{HOUSE}key_env = "HOUSE_KEY"', {})
    assert unset[0][1:] == ("warn", f"has no key: HOUSE_KEY is not set in this shell; {PASSED}")
    assert findings(file, "[gateway]\nenabled = false", {"OPENAI_API_KEY": CANARY}) == [
        ("gateway", "ok", "is switched off in the settings")
    ]


def test_what_a_running_service_has_counts_and_not_what_this_shell_has(file: Path) -> None:
    service = {"HOUSE_KEY": True, "OPENAI_API_KEY": False, "ZAI_KEY": True}
    found = findings(
        file, f'{HOUSE}key_env = "HOUSE_KEY"', {"OPENAI_API_KEY": CANARY}, service=service
    )
    not_tried = "is set where the service runs; this shell does not have it, so it was not tried"
    assert found[0] == ("upstream house", "ok", f"HOUSE_KEY {not_tried}")
    unset = "has no key: OPENAI_API_KEY is not set where the service runs"
    assert found[-1] == ("upstream openai", "ok", f"{unset}; {PASSED}")
    settings = loaded(file, SLOT)
    (slot,) = slot_findings(settings, Environment({}, service))
    assert (slot.verdict, slot.found) == ("ok", f"ZAI_KEY {not_tried}")
    (slot,) = slot_findings(settings, Environment({}, service, {"ZAI_KEY": "holds no key"}))
    assert (slot.verdict, slot.found) == ("fail", "holds no key")
    (slot,) = slot_findings(settings, Environment({"ZAI_KEY": CANARY}, {"ZAI_KEY": False}))
    assert (slot.verdict, slot.found) == ("fail", "ZAI_KEY is not set where the service runs")


def test_the_doctor_promises_nothing_to_clients_of_an_upstream_with_slots(file: Path) -> None:
    for mode in ("loopback", "always", "never"):
        passing = f'[gateway]\npassthrough_keys = "{mode}"\n'
        found = findings(file, f'{passing}{HOUSE}{ADDRESS}slots = ["work"]\n{SLOT}', {})
        line = "has no key: none of its slots has one that can be read"
        assert found[0] == ("upstream house", "warn", line)


def test_the_doctor_warns_where_clients_send_tokens_and_no_upstream_has_a_key(file: Path) -> None:
    required = "[auth]\nrequired = true\n"
    found = findings(file, required, {})
    assert [one[:2] for one in found] == [(one[0], "warn") for one in KEYLESS]
    assert found[0][2].endswith("is not set in this shell, and clients send tokens of Headgate")
    with upstream_server() as (address, _):
        house = f'{HOUSE}base_url = "{address}/v1"\nkey_env = "HOUSE_KEY"\n'
        found = findings(file, required + house, {"HOUSE_KEY": CANARY})
    assert {one[1] for one in found if one[0] in dict.fromkeys(one[0] for one in KEYLESS)} == {"ok"}


def test_the_doctor_asks_an_upstream_with_each_of_its_keys_and_tells_none(file: Path) -> None:
    with upstream_server() as (address, seen):
        slots = SLOT + SLOT.replace("work", "spare").replace("ZAI", "SPARE")
        text = f"""
[upstreams.good]
kind = "openai"
base_url = "{address}/200/v1"
slots = ["work", "spare"]
headers = {{ X-Team = "{{env.TEAM}}" }}
[upstreams.listless]
kind = "openai"
base_url = "{address}/404/v1"
key_env = "HOUSE_KEY"
[upstreams.refused]
kind = "anthropic"
base_url = "{address}/403"
key_env = "HOUSE_KEY"
[upstreams.broken]
kind = "openai"
base_url = "{address}/503"
key_env = "HOUSE_KEY"
[upstreams.gone]
kind = "openai"
base_url = "http://127.0.0.1:1/v1"
key_env = "HOUSE_KEY"
[upstreams.unfilled]
kind = "openai"
headers = {{ X-Team = "{{env.NO_SUCH_TEAM}}" }}
{slots}
"""
        environ = {"ZAI_KEY": CANARY, "SPARE_KEY": CANARY, "HOUSE_KEY": CANARY, "TEAM": "red"}
        found = findings(file, text, environ)
    host = address.removeprefix("http://")
    untried = "answers 404 where models are listed, so nobody knows whether it takes the key"
    assert found[3:] == [
        ("upstream good", "ok", f"{host} answers to the key in slot work"),
        ("upstream good", "ok", f"{host} answers to the key in slot spare"),
        ("upstream listless", "ok", f"{host} {untried} (HOUSE_KEY)"),
        ("upstream refused", "fail", f"{host} answers 403: key refused (HOUSE_KEY)"),
        ("upstream broken", "warn", f"{host} answers 503"),
        ("upstream gone", "warn", "127.0.0.1:1 cannot be reached: ConnectError"),
    ]
    assert found[0][:2] == ("upstream unfilled", "fail")
    assert "NO_SUCH_TEAM" in found[0][2]
    sent = dict(seen)
    assert set(sent) == {"/200/v1/models", "/404/v1/models", "/403/v1/models", "/503/models"}
    good = {name.lower(): value for name, value in sent["/200/v1/models"].items()}
    assert (good["authorization"], good["x-team"]) == (f"Bearer {CANARY}", "red")
    refused = {name.lower(): value for name, value in sent["/403/v1/models"].items()}
    assert refused["x-api-key"] == CANARY
    assert "authorization" not in refused


def test_the_doctor_names_routed_models_without_a_price_and_what_to_add(file: Path) -> None:
    text = (
        f'{HOUSE}models = ["mystery-1", "mystery-*"]\n'
        '[models.fast]\nroute = ["openai/gpt-4o-mini", "house/mystery-2"]\n'
    )
    settings = loaded(file, text)
    routes = [one for one in gateway_findings(settings, Environment({})) if one.check == "routes"]
    assert [(one.verdict, one.found.split()[0]) for one in routes] == [
        ("warn", "'mystery-2'"),
        ("warn", "'mystery-1'"),
    ]
    assert routes[0].advice.startswith('add [prices."mystery-2"] with input')
    priced = f'{text}[prices."mystery-*"]\ninput = 1\noutput = 2\n'
    assert findings(file, priced, {})[-1] == (
        "routes",
        "ok",
        "every model that the settings name has a price",
    )


def test_the_doctor_says_which_variables_of_a_command_win_over_the_gateway(file: Path) -> None:
    command = '[targets.{0}]\nkind = "command"\ncommand = ["agent"]\n'
    own = 'env = { OPENAI_API_KEY = "x", ANTHROPIC_BASE_URL = "http://h" }\n'
    text = (
        command.format("own") + own + command.format("plain") + command.format("off") + own
    ) + "gateway = false\n"
    found = [one for one in findings(file, text, {}) if one[0].startswith("target")]
    line = "its env sets OPENAI_API_KEY, ANTHROPIC_BASE_URL, which wins over what the gateway"
    assert found == [("target own", "warn", f"{line} would set")]
