"""What is refused is let go of at once, and not when the garbage collector looks next."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from api.asgi_client import Client

REFUSALS = 10
SIZE = 500_000


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Count memory, and never look for garbage."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "body",
    [
        b"[" * SIZE,
        b'{"agentId": "a", "action": "' + b"x" * SIZE + b'"}',
        b'{"agentId": "a", "action": "a", "priority": "x", "params": "' + b"x" * SIZE + b'"}',
        b'{"agentId": "a", "action": "a", "target": "no-such", "params": "' + b"x" * SIZE + b'"}',
    ],
    ids=["deep", "long", "wrong", "unknown"],
)
def test_a_body_that_is_refused_is_not_kept(body: bytes) -> None:
    client = Client()
    assert 400 <= client.request("POST", "/tasks", body).status < 500
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(REFUSALS):
        client.request("POST", "/tasks", bytes(bytearray(body)))
    assert tracemalloc.get_traced_memory()[0] - before < SIZE
