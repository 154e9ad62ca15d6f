"""A key file that is replaced under a slot that runs: the new key starts anew, without a reload."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from engine.slot_stage import MINUTE, Stage, World, failure, play, slot
from headgate.core.slots.slot import SlotConfig
from headgate.core.slots.wakes import WakeMode
from headgate.engine.slots.slot import SlotSetup
from headgate.errors import InvalidSettingError
from headgate.testing import SimulatedLoop

AFTER_RESET = WakeMode.AFTER_RESET


class KeyFile:
    """A file with a key, as a test writes it; None is a file that is not there."""

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.is_noticed = True
        self.reads = 0
        self._mark = 0

    def replace(self, key: str | None) -> None:
        """Write another key."""
        self.key = key
        self._mark += self.is_noticed

    def read(self) -> str:
        """Return the key, or say that there is none."""
        self.reads += 1
        if self.key is None:
            raise InvalidSettingError("slots.work.key_file", "cannot be read")
        return self.key

    def setup(self, world: World, name: str = "work") -> SlotSetup:
        """Return the setup of a slot whose key is in the file."""
        plain = slot(world, name, modes=[AFTER_RESET], poll_interval_minutes=10)

        def config_for(key: str | None) -> SlotConfig:
            return msgspec.structs.replace(
                plain.config, key_digest=f"digest of {key}", settings_digest=f"settings with {key}"
            )

        return msgspec.structs.replace(
            plain,
            config=config_for(self.key),
            read_key=self.read,
            key_mark=lambda: self._mark,
            config_for=config_for,
        )


def test_a_new_key_is_polled_and_woken_within_a_minute() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        file = KeyFile("key-a")
        stage = Stage(loop, world, [file.setup(world)])
        await stage.start()
        await stage.until(0.1)
        assert [asked.key for asked in world.wakes] == ["key-a"]
        file.replace("key-b")
        await asyncio.sleep(MINUTE + 1)
        assert [asked.key for asked in world.wakes] == ["key-a", "key-b"]
        assert stage.status().config.key_digest == "digest of key-b"
        assert "key-replaced" in stage.log.actions()
        await asyncio.sleep(2 * MINUTE)
        assert stage.row().reading is not None
        assert stage.row().schedule.next_reset_epoch_ms is not None

    play(main)


def test_a_refused_key_that_is_mended_is_tried_again_within_a_minute() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        file = KeyFile("key-a")
        world.poll_script.append(failure("refused", code=401))
        stage = Stage(loop, world, [file.setup(world)])
        await stage.start()
        await stage.until(1)
        assert stage.row().schedule.slot_auto_disabled
        assert len(world.polls) == 1
        file.replace("key-b")
        await asyncio.sleep(MINUTE + 1)
        assert not stage.row().schedule.slot_auto_disabled
        assert [asked.key for asked in world.wakes] == ["key-b"]

    play(main)


def test_a_key_that_is_back_is_the_key_that_it_was() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        file = KeyFile("key-a")
        stage = Stage(loop, world, [file.setup(world)])
        await stage.start()
        await stage.until(0.1)
        reading = stage.row().reading
        file.replace(None)
        await asyncio.sleep(MINUTE + 1)
        assert stage.row().reading == reading is not None
        file.replace("key-a")
        await asyncio.sleep(2 * MINUTE)
        assert stage.status().standing.closure is None
        assert len(world.wakes) == 1
        assert "key-replaced" not in stage.log.actions()

    play(main)


def test_a_slot_that_started_without_its_key_starts_when_it_comes() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        file = KeyFile(None)
        stage = Stage(loop, world, [file.setup(world)])
        await stage.start()
        await stage.until(1.005)
        assert stage.status().standing.closure is not None
        file.replace("key-a")
        await asyncio.sleep(MINUTE + 1)
        assert stage.status().standing.closure is None
        assert [asked.key for asked in world.wakes] == ["key-a"]

    play(main)


def test_a_change_that_no_mark_shows_is_seen_when_the_key_is_read() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        file = KeyFile("key-a")
        file.is_noticed = False
        stage = Stage(loop, world, [file.setup(world)])
        await stage.start()
        await stage.until(0.1)
        file.replace("key-b")
        await stage.until(0.3)
        assert [asked.key for asked in world.wakes] == ["key-a", "key-b"]

    play(main)


def test_slots_share_wakes_by_the_keys_that_they_have_now() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        files = {name: KeyFile("key-a") for name in ("work", "spare")}
        stage = Stage(loop, world, [file.setup(world, name) for name, file in files.items()])
        await stage.start()
        await stage.until(0.1)
        assert len(world.wakes) == 1
        files["spare"].replace("key-b")
        await asyncio.sleep(MINUTE + 1)
        assert [asked.key for asked in world.wakes] == ["key-a", "key-b"]

    play(main)


def test_a_key_that_stays_is_read_for_requests_only() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        file = KeyFile("key-a")
        stage = Stage(loop, world, [file.setup(world)])
        await stage.start()
        await stage.until(4)
        # The first look has nothing to compare with.
        assert file.reads == len(world.polls) + len(world.wakes) + 1

    play(main)


def test_the_mark_of_a_file_changes_with_it(tmp_path: Path) -> None:
    from headgate.app import file_mark  # noqa: PLC0415  the layer above

    path = tmp_path / "key"
    absent = file_mark(str(path))
    path.write_text("key-a")
    first = file_mark(str(path))
    assert file_mark(str(path)) == first != absent
    new = tmp_path / "new"
    new.write_text("key-b")
    new.replace(path)
    assert file_mark(str(path)) != first
