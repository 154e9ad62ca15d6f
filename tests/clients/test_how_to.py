"""What the page about clients tells its readers to type, typed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from clients.client_processes import CLIENTS, SILENT, installed_commands
from clients.stage import Stage, skip_unless_here
from doc_pages import ROOT, blocks_of
from gateway.billing_upstream import TEXT

PAGE = ROOT / "docs/how-to/connect-clients.md"
ADDRESS = "http://127.0.0.1:7420"
BY_NAME = {client.name: client for client in CLIENTS}
SECTIONS = {
    "Claude Code": ("claude-code", 1),
    "Codex": ("codex", 1),
    "opencode": ("opencode", 1),
    "The SDKs of OpenAI and Anthropic": ("openai-chat", 2),
    "LangChain": ("langchain-openai", 2),
}
"""Each section, the client that it needs, and how many answers it prints."""


def commands_under(heading: str) -> str:
    """Return what a section has its reader type, one block after the other."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    section = dict(zip(parts[1::2], parts[2::2], strict=True))[heading]
    blocks = [block.body for block in blocks_of(section) if block.language == "sh"]
    return "\n".join(["set -e", *blocks])


@pytest.mark.parametrize("heading", SECTIONS)
def test_what_the_page_says_works(stage: Stage, tmp_path: Path, heading: str) -> None:
    name, answers = SECTIONS[heading]
    skip_unless_here(BY_NAME[name])
    commands = commands_under(heading)
    assert ADDRESS in commands
    has_langchain = heading == "LangChain"
    assert typed(commands, stage, tmp_path, has_langchain=has_langchain).count(TEXT) == answers


def test_codex_asks_over_http_when_its_own_provider_has_no_websocket(
    stage: Stage, tmp_path: Path
) -> None:
    skip_unless_here(BY_NAME["codex"])
    (option,) = re.findall(r"`codex exec (-c \S+)`", PAGE.read_text())
    command = f"CODEX_API_KEY=any codex exec --skip-git-repo-check -m gpt-5 {option} hello"
    assert TEXT in typed(command, stage, tmp_path)
    assert "/v1/responses" in {request.path for request in stage.upstream.requests}


def typed(commands: str, stage: Stage, folder: Path, *, has_langchain: bool = False) -> str:
    """Type commands that must succeed into a shell of somebody new; return what they print."""
    path = installed_commands(folder / "bin", has_langchain=has_langchain)
    ended = subprocess.run(
        ["bash", "-c", commands.replace(ADDRESS, stage.service.address)],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), **SILENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
