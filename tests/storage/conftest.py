"""Fresh task stores of every kind."""

from __future__ import annotations

import pytest

from storage.scene import STORES, Place, fresh_place


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest) -> Place:
    """Give a place for a task store, of each kind in turn."""
    return fresh_place(request.param, request)
