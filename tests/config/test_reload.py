"""Reload: what a file changes while tasks run, and what it must not change."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from config.reload_load import reload_under_load
from config.running import FAST, WORK, running
from headgate.cli.up import welcome
from headgate.config.loading import Origin, decode
from headgate.config.reload import ConfigUpkeep, FileWatcher
from headgate.errors import InvalidSettingError

RELOADS = 60


async def test_reloads_under_load_lose_no_task_and_pass_no_limit(tmp_path: Path) -> None:
    found = await reload_under_load(tmp_path, reloads=RELOADS)
    assert found.problems() == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[scheduler]\nmax_inflight = 'many'\n", "scheduler.max_inflight: must be a whole number"),
        ("[scheduler]\nmax_inflght = 3\n", "scheduler.max_inflght: is not a setting; did you mean"),
        ("[scheduler\n", "headgate.toml, line 1"),
        ("[projects.a]\ncredit_weight = -1\n", "projects.a.credit_weight: must be a number"),
        ("[targets.x]\nkind = 'callable'\nentry_point = 'nowhere:work'\n", "targets.x.entry_point"),
        ("[targets.x]\nkind = 'http'\nheaders = { a = '{env.NOT_SET}' }\n", "targets.x"),
        ("[budgets.'session:s']\n", 'budgets."session:s": limits nothing'),
        ("[rate_limits.x]\n", "rate_limits.x: limits nothing"),
    ],
)
async def test_a_file_that_is_wrong_changes_nothing_and_says_why(
    tmp_path: Path, text: str, line: str
) -> None:
    async with running(tmp_path, FAST + WORK) as service:
        before = service.service.config.state
        service.path.write_text(text)
        response = await service.ask("POST", "/scheduler/reload")
        assert response.status == 422
        assert response.problem["code"] == "invalid_settings"
        assert line in response.problem["error"]
        assert service.service.config.state is before
        assert (await service.ended(await service.submit()))["state"] == "done"


async def test_a_file_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + WORK) as service:
        service.path.unlink()
        response = await service.ask("POST", "/scheduler/reload")
        assert response.status == 422
        assert "cannot be read" in response.problem["error"]


async def test_a_reload_answers_with_what_changed_and_what_waits(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + WORK) as service:
        service.path.write_text(FAST + "max_inflight = 7\n" + WORK + "[server]\nport = 1\n")
        body = (await service.ask("POST", "/scheduler/reload")).json
        assert body["changed"] == [{"key": "scheduler.max_inflight", "from": 20, "to": 7}]
        assert body["needsRestart"] == [{"key": "server.port", "from": 7420, "to": 1}]
        assert (await service.get("/scheduler/stats"))["config"]["maxInflight"] == 7
        again = (await service.ask("POST", "/scheduler/reload")).json
        assert (again["changed"], len(again["needsRestart"])) == ([], 1)


async def test_a_reload_and_a_start_warn_of_a_budget_whose_project_does_not_exist(
    tmp_path: Path,
) -> None:
    budget = "[projects.search]\n[budgets.'project:{}']\nlimit_usd = '1'\n"
    warning = (
        "budgets.\"project:serch\": there is no project 'serch', so it limits nothing; "
        "add it under [projects], or correct the name"
    )
    async with running(tmp_path, FAST + WORK) as service:
        for name, expected in (("serch", [warning]), ("search", [])):
            service.path.write_text(FAST + WORK + budget.format(name))
            body = (await service.ask("POST", "/scheduler/reload")).json
            assert body["warnings"] == expected
            banner = await welcome(service.service, "http://h:1", tmp_path, [], {}, as_json=False)
            lines = [line for line in banner.splitlines() if "budgets." in line]
            assert lines == [f"  warning: {line}" for line in expected]


async def test_slots_come_change_and_go_without_a_restart(tmp_path: Path) -> None:
    # No request leaves: the slot has no key.
    slot = "[[slots]]\nname = 'a'\nprovider = 'zai'\nkey_env = 'NOT_SET_ANYWHERE'\n"
    heard: list[dict[str, int]] = []
    async with running(tmp_path, FAST + WORK) as service:
        service.service.config.listen(
            lambda settings, _: heard.append(
                {name: one.poll_interval_minutes for name, one in settings.slots.items()}
            )
        )
        keys = []
        for text in (slot, slot + "poll_interval_minutes = 5\n", ""):
            service.path.write_text(FAST + WORK + text)
            body = (await service.ask("POST", "/scheduler/reload")).json
            assert body["needsRestart"] == []
            keys.append([change["key"] for change in body["changed"]])
    assert keys == [["slots.a"], ["slots.a.poll_interval_minutes"], ["slots.a"]]
    assert heard == [{}, {"a": 30}, {"a": 5}, {}]


async def test_what_left_the_file_finishes_what_it_has_and_takes_nothing_new(
    tmp_path: Path,
) -> None:
    held = FAST + WORK + "[projects.old]\nstatus = 'paused'\n"
    async with running(tmp_path, held) as service:
        waiting = await service.submit(projectId="old")
        service.path.write_text(FAST + WORK)
        changed = (await service.ask("POST", "/scheduler/reload")).json["changed"]
        assert changed == [{"key": "projects.old.status", "from": "paused", "to": "draining"}]
        refused = await service.ask(
            "POST", "/tasks", {"agentId": "a", "action": "run", "projectId": "old"}
        )
        assert (refused.status, refused.problem["code"]) == (409, "draining")
        assert "project 'old' is draining" in refused.problem["error"]
        assert (await service.ended(waiting))["state"] == "done"
        await service.service.config.finish_draining()
        assert (await service.ask("GET", "/projects/old")).status == 404


async def test_a_target_that_left_runs_what_waits_for_it(tmp_path: Path) -> None:
    old = "[targets.old]\nkind = 'callable'\nentry_point = 'config.reload_work:work'\n"
    async with running(tmp_path, FAST + WORK + old) as service:
        await service.ask("POST", "/scheduler/pause")
        waiting = await service.submit(target="old")
        service.path.write_text(FAST + WORK)
        await service.ask("POST", "/scheduler/reload")
        config = service.service.config
        await config.finish_draining()
        assert "old" in config.settings.targets
        await service.ask("POST", "/scheduler/resume")
        assert (await service.ended(waiting))["state"] == "done"
        await config.finish_draining()
        assert list(config.settings.targets) == ["work"]
        assert list(service.service.engine.executors) == ["gateway", "work"]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (
            "[agents.x]\ntarget = 'old'\n",
            "[agents.x]\ntarget = 'old'\n",
            "agents.x.target: there is no target 'old'",
        ),
        ("", "[rate_limits.old]\nkind = 'target'\nrequests_per_minute = 5\n", "rate_limits.old"),
    ],
)
async def test_a_file_that_is_wrong_on_its_own_is_refused_whatever_drains_beside_it(
    tmp_path: Path, before: str, after: str, line: str
) -> None:
    old = "[targets.old]\nkind = 'callable'\nentry_point = 'config.reload_work:work'\n"
    async with running(tmp_path, FAST + WORK + old + before) as service:
        config = service.service.config
        state = config.state
        service.path.write_text(FAST + WORK + after)
        response = await service.ask("POST", "/scheduler/reload")
        assert response.status == 422, response.body
        assert line in response.problem["error"]
        assert config.state is state


async def test_upkeep_goes_on_beside_settings_that_contradict_each_other(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + WORK + "[projects.gone]\n") as service:
        config = service.service.config
        service.path.write_text(FAST + WORK)
        await service.ask("POST", "/scheduler/reload")
        right = config.state
        wrong = right.tables | {"agents": {"x": {"target": "nowhere"}}}
        config.state = msgspec.structs.replace(right, tables=wrong)
        upkeep = ConfigUpkeep(config, is_shared=False)
        for _ in range(2):
            await upkeep.run_once()
        config.state = right
        await upkeep.run_once()
        assert config.state.draining == frozenset()


async def test_workers_have_the_lease_that_the_file_says_now(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + WORK) as service:
        service.path.write_text(FAST + "worker_lease_seconds = 77\n" + WORK)
        body = (await service.ask("POST", "/scheduler/reload")).json
        assert [one["key"] for one in body["changed"]] == ["scheduler.worker_lease_seconds"]
        claim = await service.ask("POST", "/agents/a/claim", {"waitSeconds": 0})
        assert claim.json["leaseSeconds"] == 77


async def test_the_watch_reads_a_file_when_it_has_come_to_rest(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + WORK) as service:
        config = service.service.config
        watch = FileWatcher(config, service.path)
        assert not await watch.run_once()
        # An editor puts another file in its place.
        other = tmp_path / "other"
        other.write_text(FAST + "max_inflight = 7\n" + WORK)
        other.replace(service.path)
        assert not await watch.run_once()
        assert await watch.run_once()
        assert config.settings.scheduler.max_inflight == 7
        assert not await watch.run_once()


async def test_the_watch_is_not_disturbed_by_a_wrong_or_missing_file(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + WORK) as service:
        watch = FileWatcher(service.service.config, service.path)
        service.path.write_text("wrong")
        assert [await watch.run_once() for _ in range(3)] == [False, True, False]
        service.path.unlink()
        assert not await watch.run_once()
        service.path.write_text(FAST + "max_inflight = 7\n" + WORK)
        assert [await watch.run_once() for _ in range(2)] == [False, True]
        assert service.service.config.settings.scheduler.max_inflight == 7


async def test_a_service_that_a_program_made_has_nothing_to_reload(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + WORK) as service:
        service.service.config.origin = None
        response = await service.ask("POST", "/scheduler/reload")
        assert response.status == 422


async def test_budgets_of_the_file_are_in_the_books_at_once(tmp_path: Path) -> None:
    budget = "[budgets.'session:s']\nlimit_tokens = 10\n"
    async with running(tmp_path, FAST + WORK + budget) as service:
        task = {"scopes": ["session:s"], "estimate": {"tokens": 50}, "onExhausted": "reject"}
        refused = await service.ended(await service.submit(**task))
        assert refused["state"] == "rejected"
        service.path.write_text(FAST + WORK + budget.replace("10", "100"))
        await service.ask("POST", "/scheduler/reload")
        assert (await service.ended(await service.submit(**task)))["state"] == "done"


def test_reading_again_raises_what_a_check_would_say(tmp_path: Path) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text("[scheduler]\nmax_inflight = -1\n")
    with pytest.raises(InvalidSettingError, match=r"scheduler\.max_inflight: must be"):
        decode(Origin(path=path).read())
