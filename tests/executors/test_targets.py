"""Targets as the configuration writes them, and as executors are built from them."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import msgspec
import pytest

from doc_pages import ROOT
from headgate.executors.build import build_executor
from headgate.executors.callable import CallableExecutor, echo
from headgate.executors.command import PASSED_ON, CommandExecutor
from headgate.executors.http import HttpExecutor
from headgate.executors.targets import (
    ECHO,
    CallableTarget,
    CommandTarget,
    HttpTarget,
    Resolver,
    Target,
)
from headgate.testing import VirtualClock

WRITTEN = """
[browser]
kind = "http"
url = "http://127.0.0.1:9867/tabs/{tabId}/action"
headers = { Authorization = "Bearer {env.TAB_TOKEN}" }
default = true

[tabs]
kind = "http"
url = "http://127.0.0.1:{resolved}/tabs/{tabId}/action"
resolver = { url = "http://127.0.0.1:9867/tabs/{tabId}", pointer = "/port" }

[coder]
kind = "command"
command = ["agent", "--json"]
env = { API_KEY = "{env.AGENT_KEY}" }
kill_grace_seconds = 10
slot = "claude-1"

[python]
kind = "callable"
entry_point = "package.module:function"
"""


def decoded(toml: str) -> dict[str, Target]:
    return msgspec.convert(tomllib.loads(toml), dict[str, Target])


def test_targets_are_read_from_toml() -> None:
    assert decoded(WRITTEN) == {
        "browser": HttpTarget(
            url="http://127.0.0.1:9867/tabs/{tabId}/action",
            headers={"Authorization": "Bearer {env.TAB_TOKEN}"},
            default=True,
        ),
        "tabs": HttpTarget(
            url="http://127.0.0.1:{resolved}/tabs/{tabId}/action",
            resolver=Resolver(url="http://127.0.0.1:9867/tabs/{tabId}", pointer="/port"),
        ),
        "coder": CommandTarget(
            command=("agent", "--json"),
            env={"API_KEY": "{env.AGENT_KEY}"},
            kill_grace_seconds=10.0,
            slot="claude-1",
        ),
        "python": CallableTarget(entry_point="package.module:function"),
    }


def test_each_kind_has_its_executor() -> None:
    environ = {"TAB_TOKEN": "a", "AGENT_KEY": "b"}
    kinds = [
        type(build_executor(name, target, environ=environ, clock=VirtualClock()))
        for name, target in decoded(WRITTEN).items()
    ]
    assert kinds == [HttpExecutor, HttpExecutor, CommandExecutor, CallableExecutor]


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('[a]\nkind = "ftp"', "Invalid value 'ftp'"),
        ('[a]\nurl = "http://h"', "missing required field `kind`"),
        ('[a]\nkind = "http"\nurl = "http://h"\nverify = false', "unknown field `verify`"),
        ('[a]\nkind = "http"\nurl = "http://h"\nmethod = "GET"', "Invalid enum value 'GET'"),
        ('[a]\nkind = "http"\nurl = "http://h"\nmax_result_bytes = 0', "max_result_bytes"),
        ('[a]\nkind = "http"\nresolver = { pointer = "/a" }', "required field `url`"),
        ('[a]\nkind = "command"', "required field `command`"),
        ('[a]\nkind = "command"\ncommand = []', "command"),
        ('[a]\nkind = "command"\ncommand = "rm -rf"', "Expected `array`"),
        ('[a]\nkind = "callable"\nentry_point = "a:b"\nthreads = 0', "threads"),
    ],
)
def test_what_a_target_does_not_have_is_refused(toml: str, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        decoded(toml)
    assert words in str(raised.value)


def test_every_variable_that_a_child_gets_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/executors.md").read_text()
    assert all(f"`{name}`" in page for name in PASSED_ON)


def test_the_built_in_target_is_the_default_one() -> None:
    assert ECHO.default
    assert ECHO.entry_point == f"{echo.__module__}:{echo.__name__}"


def test_only_http_targets_load_the_http_client() -> None:
    code = (
        "import sys\n"
        "from headgate.executors.build import build_executor\n"
        "from headgate.executors.targets import ECHO, HttpTarget\n"
        "build_executor('a', ECHO, environ={}, clock=lambda: 0.0)\n"
        "assert 'httpx2' not in sys.modules\n"
        "build_executor('b', HttpTarget(url='http://h'), environ={}, clock=lambda: 0.0)\n"
        "assert 'httpx2' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
