"""The targets that no file has to write: what changes beside the file leaves the default alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.running import FAST, WORK, running
from config.test_state import override, situation_of, tables_of
from headgate.core.snapshot import Standing
from headgate.errors import InvalidSettingError

ONE = "[targets.shell]\nkind = 'command'\ncommand = ['true']\n"
TWO = ONE + ONE.replace("shell", "other")
PULL = "[targets.pull]\nkind = 'pull'\n"


@pytest.mark.parametrize(
    ("text", "default"),
    [
        ("", "echo"),
        (ONE, "shell"),
        (TWO, None),
        (TWO.replace("[targets.other]", "[targets.other]\ndefault = true"), "other"),
        (PULL, "pull"),
        (ONE + PULL, "shell"),
    ],
)
@pytest.mark.parametrize("status", ["paused", "draining", "active"])
def test_a_change_of_pull_leaves_the_default_and_all_other_targets(
    text: str, default: str | None, status: str
) -> None:
    before = situation_of(text)
    after = before.with_overrides([override(before, "targets", "pull", "status", status)])
    assert (before.settings.default_target, after.settings.default_target) == (default, default)
    assert after.settings.all_targets.keys() == before.settings.all_targets.keys()
    assert after.settings.targets["pull"].status is Standing(status)


def test_a_change_of_echo_and_of_pull_go_together() -> None:
    before = situation_of("")
    ones = [override(before, "targets", name, "status", "paused") for name in ("echo", "pull")]
    after = before.with_overrides(ones).settings
    assert {name: one.status for name, one in after.targets.items()} == {
        "echo": Standing.PAUSED,
        "pull": Standing.PAUSED,
    }
    assert after.default_target == "echo"


async def test_the_built_in_default_takes_tasks_while_pull_is_paused(tmp_path: Path) -> None:
    async with running(tmp_path, FAST) as service:
        response = await service.ask("PATCH", "/targets/pull", {"status": "paused"})
        assert response.status == 200
        shown = {one["id"]: one for one in (await service.get("/targets"))["targets"]}
        assert (shown["pull"]["status"], shown["echo"]["default"]) == ("paused", True)
        assert (await service.ended(await service.submit()))["state"] == "done"


@pytest.mark.parametrize("after", ["", PULL])
def test_a_file_whose_last_target_goes_has_another_default_at_once(after: str) -> None:
    drained = situation_of(ONE).with_file(tables_of(after))
    expected = situation_of(after).settings.default_target
    assert drained.draining == {("targets", "shell")}
    assert drained.settings.default_target == expected
    again = drained.with_file(tables_of(after))
    assert again.settings == drained.settings
    assert again.after_draining(again.draining).settings.default_target == expected


def test_a_change_of_echo_holds_while_the_last_target_drains() -> None:
    before = situation_of("")
    patched = before.with_overrides([override(before, "targets", "echo", "status", "paused")])
    with_target = patched.with_file(tables_of(ONE))
    drained = patched.with_file(tables_of("[scheduler]\nmax_inflight = 3\n"))
    assert with_target.settings.default_target == "shell"
    assert drained.settings.targets["echo"].status is Standing.PAUSED
    assert drained.ended() == ()


async def test_the_default_takes_tasks_while_the_last_target_drains(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + WORK) as service:
        await service.ask("POST", "/scheduler/pause")
        waiting = await service.submit(target="work")
        service.path.write_text(FAST)
        await service.ask("POST", "/scheduler/reload")
        new = await service.submit()
        await service.ask("POST", "/scheduler/resume")
        assert (await service.ended(new))["target"] == "echo"
        assert (await service.ended(waiting))["state"] == "done"


async def test_pull_never_drains_because_it_left_the_file(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + WORK + PULL + "slot = 's'\n") as service:
        await service.submit(target="pull")
        service.path.write_text(FAST + WORK)
        await service.ask("POST", "/scheduler/reload")
        await service.submit(target="pull")
        shown = await service.get("/targets/pull")
        assert (shown["status"], shown["configured"]) == ("active", True)


@pytest.mark.parametrize("name", ["pull", "gateway"])
def test_a_built_in_name_is_of_its_own_kind(name: str) -> None:
    text = f"[targets.{name}]\nkind = 'command'\ncommand = ['true']\n"
    with pytest.raises(InvalidSettingError, match=f"always of kind {name}"):
        situation_of(text)


@pytest.mark.parametrize("key", ["slot = 'work'", "provider = 'zai'", "gateway = false"])
def test_what_the_gateway_decides_is_not_set_on_its_target(key: str) -> None:
    slot = "[[slots]]\nname = 'work'\nprovider = 'zai'\nkey_env = 'K'\n"
    with pytest.raises(InvalidSettingError, match="is for the gateway to say"):
        situation_of(f"{slot}[targets.gateway]\nkind = 'gateway'\n{key}\n")
