"""A ledger that is away when a run ends: it is waited for, and what is left is said."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from budgets.servers import ValkeyServer, running_valkey
from headgate.workflow import local_backend as local
from headgate.workflow.backend import Backend
from headgate.workflow.conductor import Conductor
from headgate.workflow.local_backend import local_backend
from headgate.workflow.parser import read_workflow
from headgate.workflow.report import RunReport, RunState
from headgate.workflow.run_folder import Run, create_run, open_run, read_record
from headgate.workflow.run_list import show_run
from headgate.workflow.run_record import RunOptions, resumed_options

HELD_SECONDS = 30.0
BOTH_MICRO_USD = 800_000
TEXT = b"""\
config: {budget_usd: 5.00, concurrency: 2}
steps:
  - id: case
    foreach: [1, 2]
    command: ["sh", "-c", "touch began-{index}; until [ -e goes-on ]; do sleep 0.02; done"]
    cost_usd: 0.40
"""


class Scene:
    """A run with a ledger in Valkey, of a session with a limit of one dollar."""

    def __init__(self, folder: Path, server: ValkeyServer) -> None:
        self.folder, self.server = folder, server
        self.options = RunOptions(
            data=folder / "data",
            tracker="redis",
            redis_url=server.url,
            session_id="x",
            session_micro_usd=1_000_000,
        )
        source = folder / "one.yaml"
        source.write_bytes(TEXT)
        workflow = read_workflow(source, TEXT)
        self.run = create_run(
            self.options, source=source, text=TEXT, workflow=workflow, now=1_000.0
        )

    async def run_without_ledger(self) -> tuple[RunReport, Backend]:
        """Run it; the ledger goes while both steps run, and each step ends after that."""
        with self.run.held():
            backend = self.backend(self.run, self.options)
            running = asyncio.create_task(Conductor(self.run, backend).run())
            async with asyncio.timeout(HELD_SECONDS):
                while len(list(self.folder.glob("began-*"))) < 2:  # noqa: ASYNC110 - a process
                    await asyncio.sleep(0.01)
                self.server.kill()
                (self.folder / "goes-on").touch()
                return await running, backend

    async def resumed(self) -> RunReport:
        """Go on with the run."""
        run = open_run(self.options.data, "last")
        options = resumed_options(run.record, RunOptions(data=self.options.data))
        with run.held():
            return await Conductor(run, self.backend(run, options)).run()

    def backend(self, run: Run, options: RunOptions) -> Backend:
        """Return what carries the run out."""
        return local_backend(run, run.workflow, options, {"PATH": os.environ["PATH"]})


async def test_a_run_that_the_ledger_has_not_recorded_is_not_done_and_a_resume_books_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "BOOK_SECONDS", 0.2)
    with running_valkey() as server:
        scene = Scene(tmp_path, server)
        report, _ = await scene.run_without_ledger()
        assert (report.state, report.unbooked_micro_usd) == (RunState.UNBOOKED, BOTH_MICRO_USD)
        assert report.ended == report.total
        assert "Redis is unavailable" in report.trouble
        assert all(one.as_of is not None for one in report.money)
        record = read_record(scene.run.path)
        assert (record.state, record.unbooked_micro_usd) == (RunState.UNBOOKED, BOTH_MICRO_USD)
        shown = show_run(tmp_path / "data", "last").report
        assert (shown.state, shown.unbooked_micro_usd) == (RunState.UNBOOKED, BOTH_MICRO_USD)
        server.start()
        again = await scene.resumed()
        assert (again.state, again.unbooked_micro_usd, again.trouble) == (RunState.DONE, 0, "")
        assert [one.spent_micro_usd for one in again.money] == [BOTH_MICRO_USD] * 2
        assert [one.as_of for one in again.money] == [None, None]


async def test_the_end_of_a_run_waits_for_a_ledger_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_valkey() as server:
        scene = Scene(tmp_path, server)
        left = asyncio.Event()

        def back() -> None:
            server.start()
            left.set()

        close = local.LocalBackend.close

        async def closed(backend: local.LocalBackend, *, drain_seconds: float) -> None:
            asyncio.get_running_loop().call_later(0.3, back)
            await close(backend, drain_seconds=drain_seconds)

        monkeypatch.setattr(local.LocalBackend, "close", closed)
        report, _ = await scene.run_without_ledger()
        assert left.is_set()
        assert (report.state, report.unbooked_micro_usd) == (RunState.DONE, 0)
        assert [one.spent_micro_usd for one in report.money] == [BOTH_MICRO_USD] * 2
