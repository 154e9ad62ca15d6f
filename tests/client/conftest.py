"""Each test that asks for `ask` runs with both clients."""

from __future__ import annotations

import pytest

from client.both_clients import Ask, ask_async, ask_sync


@pytest.fixture(params=[ask_sync, ask_async], ids=["SyncClient", "Client"])
def ask(request: pytest.FixtureRequest) -> Ask:
    chosen: Ask = request.param
    return chosen
