"""Tasks for a target that is no longer configured: they wait, and can be told apart."""

from __future__ import annotations

from pathlib import Path

from config.running import FAST, WORK, running

OLD = "[targets.old]\nkind = 'callable'\nentry_point = 'config.reload_work:work'\n"
LINE = "target old is closed: it is not configured; put it back into the file, or cancel the task"


async def test_tasks_for_a_target_that_is_gone_after_a_restart_wait_for_it(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/headgate.db"
    async with running(tmp_path, FAST + WORK + OLD, store=store) as service:
        await service.ask("PATCH", "/targets/old", {"status": "paused"})
        waiting = [await service.submit(target="old") for _ in range(3)]
    async with running(tmp_path, FAST + WORK, store=store) as service:
        assert (await service.ended(await service.submit()))["state"] == "done"
        assert LINE in await service.why(waiting[0])
        assert (await service.ask("POST", f"/tasks/{waiting[0]}/cancel")).status == 200
        # An unrelated change leaves the others where they are.
        await service.ask("PATCH", "/targets/work", {"status": "paused"})
        await service.ask("PATCH", "/targets/work", {"status": "active"})
        assert LINE in await service.why(waiting[1])
    async with running(tmp_path, FAST + WORK, store=store) as service:
        service.path.write_text(FAST + WORK + OLD)
        assert (await service.ask("POST", "/scheduler/reload")).status == 200
        for task_id in waiting[1:]:
            assert (await service.ended(task_id))["state"] == "done"


async def test_a_target_that_came_back_drains_as_any_other(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/headgate.db"
    async with running(tmp_path, FAST + WORK + OLD, store=store) as service:
        await service.ask("POST", "/scheduler/pause")
        waiting = await service.submit(target="old")
    async with running(tmp_path, FAST + WORK, store=store) as service:
        for text in (OLD, ""):
            service.path.write_text(FAST + WORK + text)
            await service.ask("POST", "/scheduler/reload")
        await service.ask("POST", "/scheduler/resume")
        assert (await service.ended(waiting))["state"] == "done"
        await service.service.config.finish_draining()
        assert (await service.ask("GET", "/targets/old")).status == 404
