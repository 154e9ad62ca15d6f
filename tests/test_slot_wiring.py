"""From settings to slots that run: keys when they are asked for, providers that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from executors.endpoint import reply_json, running_endpoint
from headgate.app import SlotParts
from headgate.config import Settings, SlotSettings
from headgate.core.slots.quota import QuotaReport
from headgate.engine.slots.slot import SlotSetup
from headgate.errors import InvalidSettingError
from headgate.providers.provider import Call, RequestFailed, RequestSent, ResponseReceived

KEY = "hunter2.the-key-of-the-slot"
ENVIRON = {"ZAI_KEY": KEY, "ORGANISATION": "hunter2-org"}
WORK = SlotSettings(name="work", provider="zai", key_env="ZAI_KEY")


class Notes:
    """A trail that nobody reads."""

    def sent(self, request: RequestSent) -> None:
        """Take no note."""

    def received(self, response: ResponseReceived) -> None:
        """Take no note."""

    def failed(self, failure: RequestFailed) -> None:
        """Take no note."""


def with_slots(*slots: SlotSettings) -> Settings:
    return Settings(slots={slot.name: slot for slot in slots})


def only(slot: SlotSettings, environ: dict[str, str]) -> SlotSetup:
    (setup,) = SlotParts(environ).setups(with_slots(slot))
    return setup


def test_slots_are_set_up_in_the_order_of_the_file() -> None:
    other = SlotSettings(name="a", provider="openai", key_env="ZAI_KEY", logging=False)
    setups = SlotParts(ENVIRON).setups(with_slots(WORK, other))
    assert [setup.config.name for setup in setups] == ["work", "a"]
    assert [setup.is_logging for setup in setups] == [True, False]
    assert [setup.read_key() for setup in setups] == [KEY, KEY]


def test_a_slot_without_its_key_is_set_up_and_says_so_when_it_is_used() -> None:
    setup = only(WORK, {})
    with pytest.raises(InvalidSettingError) as caught:
        setup.read_key()
    assert str(caught.value) == (
        "slots.work.key_env: the variable ZAI_KEY is not set; set it where the service starts"
    )


def test_slots_whose_keys_cannot_be_read_do_not_share_a_window() -> None:
    other = SlotSettings(name="other", provider="zai", key_env="ZAI_KEY")
    without = SlotParts({}).setups(with_slots(WORK, other))
    assert len({setup.config.key_digest for setup in without}) == 2
    having = SlotParts(ENVIRON).setups(with_slots(WORK, other))
    assert len({setup.config.key_digest for setup in having}) == 1


def test_a_slot_without_a_variable_of_its_headers_says_so_when_it_is_used() -> None:
    slot = SlotSettings(name="work", provider="zai", key_env="ZAI_KEY", headers={"o": "{env.ORG}"})
    with pytest.raises(InvalidSettingError) as caught:
        only(slot, ENVIRON).read_key()
    assert str(caught.value).startswith(
        "slots.work.headers.o: the environment variable ORG is not set"
    )
    with pytest.raises(InvalidSettingError, match=r"^slots\.work\.headers\.o: its value must be"):
        only(slot, ENVIRON | {"ORG": "a\nb"}).read_key()


def test_a_key_that_is_replaced_is_another_when_slots_are_set_up_again(tmp_path: Path) -> None:
    path = tmp_path / "key"
    slot = SlotSettings(name="work", provider="zai", key_file=str(path))
    path.write_text(KEY)
    before = only(slot, {})
    path.write_text("another")
    assert before.read_key() == "another"
    assert only(slot, {}).config.settings_digest != before.config.settings_digest


def test_a_provider_is_kept_until_its_place_changes() -> None:
    parts = SlotParts(ENVIRON)
    (first,) = parts.setups(with_slots(WORK))
    slower = SlotSettings(name="work", provider="zai", key_env="ZAI_KEY", poll_interval_minutes=5)
    (second,) = parts.setups(with_slots(slower))
    assert second.provider is first.provider
    assert second.config.wake.poll_interval_minutes == 5
    moved = SlotSettings(
        name="work", provider="zai", key_env="ZAI_KEY", base_url="https://open.bigmodel.cn"
    )
    (third,) = parts.setups(with_slots(moved))
    assert third.provider is not first.provider
    assert parts.setups(with_slots()) == ()
    (fourth,) = parts.setups(with_slots(moved))
    assert fourth.provider is not third.provider


def test_no_repr_of_a_setup_tells_a_secret() -> None:
    slot = SlotSettings(
        name="work", provider="zai", key_env="ZAI_KEY", headers={"o": "{env.ORGANISATION}"}
    )
    assert "hunter2" not in repr(only(slot, ENVIRON))


async def test_what_is_configured_reaches_the_wire() -> None:
    async with running_endpoint(reply_json({"used": 42})) as endpoint:
        slot = SlotSettings(
            name="work",
            provider="http-json",
            key_env="ZAI_KEY",
            quota_url=f"{endpoint.url}/quota",
            percent_pointer="/used",
            headers={"x-api-key": "{key}", "x-organisation": "id {env.ORGANISATION}"},
        )
        setup = only(slot, ENVIRON)
        call = Call(key=setup.read_key(), action="test", flow_id="1", trail=Notes())
        report = await setup.provider.read_quota(call)
        await setup.provider.close()
    assert isinstance(report, QuotaReport)
    assert report.limits[0].percentage == 42
    (seen,) = endpoint.seen
    assert (seen.method, seen.path) == ("GET", "/quota")
    assert seen.headers["x-api-key"] == KEY
    assert seen.headers["x-organisation"] == "id hunter2-org"
    assert "authorization" not in seen.headers
