"""Each test that asks for `sdk` runs with both clients of both SDKs."""

from __future__ import annotations

import pytest

from inprocess.sdk.scene import SDKS, Sdk


@pytest.fixture(params=SDKS, ids=lambda sdk: sdk.name)
def sdk(request: pytest.FixtureRequest) -> Sdk:
    chosen: Sdk = request.param
    return chosen


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the SDKs try again without the pause that they would make."""
    for name in ("anthropic", "openai"):
        monkeypatch.setattr(f"{name}._base_client.INITIAL_RETRY_DELAY", 0.001)
