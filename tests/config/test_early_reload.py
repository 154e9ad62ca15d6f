"""A signal to reload that comes at a bad time: it is carried out, or told of, and never lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

from structlog.testing import capture_logs

from config.running import FAST, WORK, running
from headgate.app import build_service
from headgate.cli import up
from headgate.config.loading import Origin, load
from headgate.config.sources import Merged
from headgate.storage.audit import SIGNAL


class Broken(Origin, frozen=True, kw_only=True):
    """A file that fails in a way that nobody foresaw."""

    def read(self, *, is_again: bool = False) -> Merged:  # noqa: ARG002
        """Fail."""
        raise RuntimeError("nobody foresaw this")


async def test_a_reload_that_comes_while_the_service_starts_waits_for_the_store(
    tmp_path: Path,
) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text(FAST + WORK)
    loaded = load(Origin(path=path, options={"store.url": f"sqlite:///{tmp_path}/headgate.db"}))
    service = build_service(loaded.settings, data=tmp_path, environ={}, loaded=loaded)
    path.write_text(FAST + "max_inflight = 7\n" + WORK)
    reloading = asyncio.ensure_future(service.config.reload(SIGNAL))
    await asyncio.wait({reloading}, timeout=0.05)
    await service.engine.start()
    try:
        async with asyncio.timeout(10.0):
            assert [one.key for one in (await reloading).changed] == ["scheduler.max_inflight"]
        assert service.config.settings.scheduler.max_inflight == 7
    finally:
        await service.engine.stop(drain_seconds=1.0)


async def test_a_signal_whose_reload_fails_unforeseen_is_told_of_in_the_log(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + WORK) as service:
        service.service.config.origin = Broken(path=service.path)
        with capture_logs() as lines:
            await up._reload(service.service)
        assert [(line["event"], line["log_level"]) for line in lines] == [
            ("settings were not reloaded", "error")
        ]
