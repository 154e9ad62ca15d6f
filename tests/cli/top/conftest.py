"""One service for all screens here; what a test adds to it, it takes away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.top.fleet import SETTINGS, Fleet
from service.support import running_service


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run the service."""
    folder: Path = tmp_path_factory.mktemp("top")
    (folder / "headgate.toml").write_text(SETTINGS)
    with running_service(folder) as process:
        yield Fleet(process)
