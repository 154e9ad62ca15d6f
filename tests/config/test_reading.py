"""A settings file that is none, or that does not come: nothing else waits for it."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from config.running import FAST, WORK, running
from headgate.config import reload
from headgate.config.loading import Origin
from headgate.config.sources import Merged, read_text
from headgate.errors import InvalidSettingError
from headgate.storage.audit import SIGNAL


def test_a_settings_file_that_is_no_regular_file_is_refused_and_not_waited_for(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(InvalidSettingError, match=r"cannot be read: .*; name a file with"):
            read_text(tmp_path / name)


async def test_a_file_that_became_a_pipe_leaves_every_other_change_possible(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FAST + WORK) as service, asyncio.timeout(20.0):
        service.path.unlink()
        os.mkfifo(service.path)
        refused = await service.ask("POST", "/scheduler/reload")
        assert (refused.status, "not a regular file" in refused.json["error"]) == (422, True)
        service.path.unlink()
        service.path.write_text(FAST + "max_inflight = 7\n" + WORK)
        assert (await service.ask("POST", "/scheduler/reload")).status == 200


class Stuck(Origin, frozen=True, kw_only=True):
    """A file on a disk that does not answer until it is told to."""

    answers: threading.Event

    def read(self, *, is_again: bool = False) -> Merged:
        """Wait, and read."""
        self.answers.wait(20.0)
        return super().read(is_again=is_again)


async def test_a_file_that_is_not_read_in_time_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "READ_SECONDS", 0.2)
    async with running(tmp_path, FAST + WORK) as service, asyncio.timeout(20.0):
        config = service.service.config
        stuck = Stuck(path=service.path, answers=threading.Event())
        config.origin = stuck
        reloading = asyncio.create_task(config.reload(SIGNAL))
        assert (await service.ask("POST", "/scheduler/pause")).status == 200
        with pytest.raises(InvalidSettingError, match="was not read within"):
            await reloading
        with pytest.raises(InvalidSettingError, match="has not been read since"):
            await config.reload(SIGNAL)
        stuck.answers.set()
        while (await service.ask("POST", "/scheduler/reload")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
