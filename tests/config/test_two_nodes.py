"""Two nodes on one PostgreSQL: what is changed at one of them comes into force at the other."""

from __future__ import annotations

from pathlib import Path

from config.running import FAST, WORK, running

FILE = FAST + WORK + "[projects.a]\ncredit_weight = 2.0\n"


async def test_a_change_at_one_node_is_in_force_at_the_other(
    tmp_path: Path, postgres_url: str
) -> None:
    one = running(tmp_path, FILE, store=postgres_url)
    two = running(tmp_path, FILE, store=postgres_url, name="other.toml")
    async with one as first, two as second:
        response = await second.ask("PATCH", "/projects/a", {"status": "paused"})
        assert response.status == 200
        await second.ask("POST", "/scheduler/pause")
        await first.service.config.refresh()
        waiting = await first.submit(projectId="a")
        lines = await first.why(waiting)
        assert "project a is paused" in lines
        assert any(line.startswith("the service is paused") for line in lines)
        # A file that changes the key at one node ends the override for both.
        first.path.write_text(FILE + "status = 'active'\n")
        await first.ask("POST", "/scheduler/reload")
        await first.ask("POST", "/scheduler/resume")
        await second.service.config.refresh()
        assert (await second.get("/projects/a"))["status"] == "active"
        assert (await second.get("/scheduler/stats"))["paused"] is False
        assert (await first.ended(waiting))["state"] == "done"


async def test_projects_that_have_tasks_and_no_settings_drain_after_a_restart(
    tmp_path: Path,
) -> None:
    store = f"sqlite:///{tmp_path}/headgate.db"
    async with running(tmp_path, FILE, store=store) as service:
        await service.ask("POST", "/scheduler/pause")
        waiting = await service.submit(projectId="a")
    async with running(tmp_path, FAST + WORK, store=store) as service:
        assert (await service.get("/projects/a"))["status"] == "draining"
        await service.ask("POST", "/scheduler/resume")
        assert (await service.ended(waiting))["state"] == "done"
        await service.service.config.finish_draining()
        assert (await service.ask("GET", "/projects/a")).status == 404
