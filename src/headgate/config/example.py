"""The example of a settings file, and the small file that `headgate init` writes: parts of it.

Rule: there is one text of both, and a service starts with either as it is. What needs a server, a
program or a variable of the environment is commented out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files

_FILE = files("headgate.config").joinpath("example.toml")
_HEADER = re.compile(r"^(?:# )?\[+([^\]]+)\]+", re.MULTILINE)
_KEY = re.compile(r"^(?:# )*(\w+) = ")

Sections = Mapping[str, tuple[str, ...] | None]
"""Sections by name, each with the keys to take from it; None takes all."""

STARTING: Sections = {
    "server": ("host", "port"),
    "scheduler": ("max_inflight", "max_queue_size", "attempt_timeout_seconds", "max_attempts"),
    "targets.review": None,
    "projects.search": ("credit_weight", "max_concurrent_agents", "budget_limit"),
    'budgets."session:eval"': ("limit_usd", "window"),
}
GATEWAY: Sections = {
    "gateway": ("enabled", "reserve", "max_wait_seconds", "passthrough_keys"),
    "upstreams.anthropic": ("kind", "base_url", "key_env", "models", "max_inflight"),
    "models.fast": None,
}
SLOTS: Sections = {
    "quota": ("max_slots",),
    "slots": (
        *("name", "provider", "key_env", "wake_model", "wake_modes", "wake_times"),
        *("poll_interval_minutes", "zone"),
    ),
}
POSTGRES: Sections = {"store": ("url",)}
OPENING = """\
# Settings of Headgate. Every key has a default. Remove the # of each line that you want to use.
# headgate config example prints all keys. headgate config check finds mistakes in this file.
"""
_ACTIVE = ("server", "scheduler", "gateway", "upstreams", "models", "quota", "store")
"""What is in force in the small file; the rest of it shows how to write a project or a budget."""


def example() -> str:
    """Return a settings file with every key of the service explained."""
    return _FILE.read_text()


def starting_file(*, gateway: bool = False, slots: bool = False, postgres: bool = False) -> str:
    """Return a small settings file, with what was asked for."""
    wanted = {
        **STARTING,
        **(GATEWAY if gateway else {}),
        **(SLOTS if slots else {}),
        **(POSTGRES if postgres else {}),
    }
    found = {_HEADER.findall(block)[0]: block for block in _blocks()}
    parts = [_part(name, found[name], keys) for name, keys in wanted.items()]
    return "\n".join([OPENING, *parts])


def _blocks() -> list[str]:
    """Return the sections of the example, each with the comment above it."""
    return [f"{block}\n" for block in example().rstrip("\n").split("\n\n")[1:]]


def _part(name: str, block: str, keys: tuple[str, ...] | None) -> str:
    lines = block.splitlines()
    if keys is not None:
        lines = [line for line in lines if not (key := _KEY.match(line)) or key[1] in keys]
    if name.partition(".")[0] not in _ACTIVE:
        lines = [line if line.startswith("#") else f"# {line}" for line in lines]
    return "".join(f"{line}\n" for line in lines)
