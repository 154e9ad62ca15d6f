"""Fake providers in processes of their own, as a newcomer starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

from service.support import environment


@contextmanager
def fake_provider(*options: str, port: str = "0") -> Iterator[str]:
    """Serve a provider, and give its address."""
    command = [sys.executable, "-m", "headgate", "fake-provider", "--json"]
    with subprocess.Popen(
        [*command, "--port", port, *options],
        stdout=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield str(json.loads(process.stdout.readline())["address"])
        finally:
            process.terminate()


def requests_of(provider: str) -> tuple[int, int]:
    """Return how many polls and how many wakes a provider has had."""
    with urlopen(f"{provider}/fake/state", timeout=10) as response:
        state = json.load(response)
    return state["quotaRequests"], state["modelRequests"]
