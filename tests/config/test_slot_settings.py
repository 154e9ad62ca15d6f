"""Slots in the settings: what may be written, whose key it is, and that no key is ever told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.cli.doctor_checks import Environment, slot_findings
from headgate.config import QuotaSettings, Settings, SlotSettings, load_settings, warnings_of
from headgate.config.loading import decode, displayed_settings, loaded_from
from headgate.config.overrides import applied_live, difference
from headgate.config.slot_keys import MAX_KEY_BYTES, read_key, slot_config
from headgate.config.sources import Merged, merge, merge_tables
from headgate.config.state import reloaded_tables
from headgate.core.slots.wakes import WakeConfig, WakeMode
from headgate.core.snapshot import Standing
from headgate.errors import InvalidSettingError

KEY = "hunter2.the-key-of-the-slot"
MINIMAL = {"name": "work", "provider": "zai", "key_env": "ZAI_KEY"}

# The shape of the file as it was first agreed on, with its defaults.
AGREED = """
[quota]
max_slots = 4
max_consecutive_errors = 10
quota_poll_backoff_cap_minutes = 480
wake_quota_retry_window_minutes = 15
wake_catch_up_minutes = 15
adaptive_polling = false
max_log_days = 7

[[slots]]
name = "work"
enabled = true
provider = "zai"
key_env = "ZAI_KEY"
base_url = "https://api.z.ai"
wake_model = "glm-4-flash"
wake_modes = ["times", "after_reset"]
wake_interval_minutes = 60
wake_times = ["09:00", "14:30"]
wake_after_reset_minutes = 1
poll_interval_minutes = 30
zone = "Europe/Berlin"
logging = true
"""


def made(*slots: Mapping[str, object], **sections: object) -> Settings:
    """Decode slots as a file writes them, each with what a slot cannot be without."""
    raw = {"slots": [MINIMAL | dict(slot) for slot in slots], **sections}
    return decode(merge_tables(raw, {}, {}, origin="file"))


def only(slot: Mapping[str, object]) -> SlotSettings:
    return next(iter(made(slot).slots.values()))


def api_error(*slots: Mapping[str, object], **sections: object) -> str:
    with pytest.raises(InvalidSettingError) as caught:
        made(*slots, **sections)
    return str(caught.value)


def outcome(raw: dict[str, object]) -> Settings | InvalidSettingError:
    try:
        return decode(merge_tables(raw, {}, {}, origin="junk"))
    except InvalidSettingError as error:
        return error


def test_the_agreed_file_has_the_defaults_and_one_slot(tmp_path: Path) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text(AGREED)
    found = load_settings(path, {}, {})
    assert found.quota == QuotaSettings()
    assert found.slots == {
        "work": SlotSettings(
            name="work",
            provider="zai",
            key_env="ZAI_KEY",
            base_url="https://api.z.ai",
            wake_model="glm-4-flash",
            wake_modes=(WakeMode.TIMES, WakeMode.AFTER_RESET),
            wake_times=("09:00", "14:30"),
            zone="Europe/Berlin",
        )
    }


def test_the_example_names_every_key_of_a_slot_and_has_none_without_its_key() -> None:
    path = Path(__file__).parents[2] / "docs/examples/headgate.toml"
    text = path.read_text()
    assert [name for name in SlotSettings.__struct_fields__ if f"{name} = " not in text] == []
    assert load_settings(path, {}, {}).slots == {}


def test_slots_stay_in_the_order_of_the_file() -> None:
    assert list(made({"name": "b"}, {"name": "a"}, {"name": "c"}).slots) == ["b", "a", "c"]


def test_variables_reach_quota_and_not_slots() -> None:
    found = load_settings(None, {"HEADGATE_QUOTA__MAX_SLOTS": "9"}, {})
    assert found.quota.max_slots == 9
    with pytest.raises(InvalidSettingError) as caught:
        load_settings(None, {"HEADGATE_SLOTS__WORK": "9"}, {})
    assert str(caught.value) == (
        "HEADGATE_SLOTS__WORK: [[slots]] is set in the file only; write it into headgate.toml"
    )


@pytest.mark.parametrize("written", [[], "none", ["none"]])
def test_a_slot_without_modes_is_never_woken(written: object) -> None:
    assert only({"wake_modes": written}).wake_modes == ()


HTTP_JSON: dict[str, object] = {
    "provider": "http-json",
    "quota_url": "https://h/q",
    "percent_pointer": "/p",
}

REFUSED: list[tuple[dict[str, object], str]] = [
    # Names; a table whose name cannot be used goes by its place.
    ({"name": ""}, "slots[0].name: must be a string of 1 to 32 characters, all of them printable"),
    ({"name": "x" * 33}, "slots[0].name: must be a string of 1 to 32 characters"),
    ({"name": "a\nb"}, "slots[0].name: must be a string of 1 to 32 characters"),
    ({"name": "  "}, "slots[0].name: has spaces at its ends; take them out"),
    ({"name": 3}, "slots[0].name: must be a string of 1 to 32 characters"),
    # Keys that nothing reads, and values outside their range.
    ({"zoen": "UTC"}, "slots.work.zoen: is not a setting; did you mean zone?"),
    ({"key": KEY}, "slots.work.key: a key is not written into the file; name its variable"),
    ({"api_key": KEY}, "slots.work.api_key: a key is not written into the file"),
    ({"wibble": KEY}, "slots.work.wibble: is not a setting; headgate config example shows all"),
    ({"name": "a b", "zoen": 1}, 'slots."a b".zoen: is not a setting; did you mean zone?'),
    ({"provider": "gpt"}, "slots.work.provider: must be one of anthropic, http-json, openai, zai"),
    (
        {"poll_interval_minutes": 0},
        "slots.work.poll_interval_minutes: must be a whole number from 1 to 1,440, not 0",
    ),
    (
        {"wake_interval_minutes": 1441},
        "slots.work.wake_interval_minutes: must be a whole number from 1 to 1,440, not 1441",
    ),
    ({"enabled": "yes"}, "slots.work.enabled: must be true or false"),
    ({"wake_modes": ["sometimes"]}, "slots.work.wake_modes[0]: must be one of interval, times"),
    ({"wake_modes": ["none", "times"]}, "slots.work.wake_modes[0]: must be one of interval"),
    ({"wake_modes": "times"}, "slots.work.wake_modes: must be a list"),
    ({"wake_on_start": True}, "slots.work.wake_on_start: needs wake_modes beside it; without one"),
    ({"wake_on_start": "no"}, "slots.work.wake_on_start: must be true or false"),
    ({"poll": "often"}, "slots.work.poll: must be one of free, request"),
    ({"poll": "request"}, "slots.work.poll: would cost a request, and the quota is told for"),
    (
        {"poll": "request", "provider": "openai", "quota_url": "https://h/q"},
        "slots.work.poll: would cost a request, and the quota is told for nothing here",
    ),
    # The key.
    ({"key_env": None}, "slots.work.key_env: is missing; write it, or key_file"),
    ({"key_file": "k"}, "slots.work.key_env: give either key_env or key_file, not both"),
    ({"key_env": KEY}, "slots.work.key_env: is the name of a variable, as ZAI_KEY; the key"),
    ({"key_env": "abcdef0123456789abcdef"}, "slots.work.key_env: is the name of a variable"),
    ({"key_env": "gsk_0123456789abcdef"}, "slots.work.key_env: is the name of a variable"),
    ({"limit_unit": 3}, "slots.work.limit_unit: needs limit_type, the type of the row that"),
    ({"key_env": ""}, "slots.work.key_env: must be a string of 1 to 2,000 characters"),
    # Times and zone.
    ({"wake_times": ["9:00"]}, "slots.work.wake_times: '9:00' is not a time; write HH:MM"),
    ({"wake_times": ["24:00"]}, "slots.work.wake_times: '24:00' is not a time; write HH:MM"),
    ({"wake_times": ["09:00"] * 6}, "slots.work.wake_times: at most 5 times, not 6"),
    ({"wake_modes": ["times"]}, "slots.work.wake_times: the times mode needs at least one time"),
    ({"zone": "Europe/Nowhere"}, "slots.work.zone: 'Europe/Nowhere' is not a zone that this"),
    ({"zone": "../etc/passwd"}, "slots.work.zone: '../etc/passwd' is not a zone that this"),
    # Addresses.
    ({"base_url": "ftp://h"}, "slots.work.base_url: must be an http:// or https:// URL"),
    ({"quota_url": "api.z.ai"}, "slots.work.quota_url: must be an http:// or https:// URL"),
    ({"request_url": "http://[::1"}, "slots.work.request_url: must be an http:// or https://"),
    (
        {"base_url": "http://api.z.ai"},
        "slots.work.base_url: would send the key unencrypted; write https",
    ),
    ({"base_url": "http://127.0.0.1.evil"}, "slots.work.base_url: would send the key"),
    ({"quota_url": "http://localhost@evil"}, "slots.work.quota_url: has a user or a password"),
    ({"base_url": "https://u:p@h"}, "slots.work.base_url: has a user or a password in it"),
    # What one provider needs and another has no use for.
    ({"percent_pointer": "/p"}, "slots.work.percent_pointer: is for provider = 'http-json' only"),
    (HTTP_JSON | {"base_url": "https://h"}, "slots.work.base_url: has no meaning for http-json"),
    (HTTP_JSON | {"quota_url": None}, "slots.work.quota_url: provider = 'http-json' needs"),
    (HTTP_JSON | {"percent_pointer": None}, "slots.work.percent_pointer: "),
    (HTTP_JSON | {"percent_pointer": "p"}, "slots.work.percent_pointer: "),
    (HTTP_JSON | {"wake_modes": ["interval"]}, "slots.work.request_url: a wake needs an address"),
    ({"wake_body": "{"}, "slots.work.wake_body: is not JSON"),
    # Headers; a value is never repeated.
    ({"headers": {"a b": "x"}}, 'slots.work.headers."a b": is not the name of a header'),
    ({"headers": {"a\n": "x"}}, 'slots.work.headers."a\\n": is not the name of a header'),
    ({"headers": {"Host": KEY}}, "slots.work.headers.Host: is set for every request"),
    ({"headers": {"x": f"{KEY}\n"}}, "slots.work.headers.x: its value must be printable ASCII"),
    ({"headers": {"x": "{kye}"}}, "slots.work.headers.x: {kye} is unknown; it may be {key} or"),
]


@pytest.mark.parametrize(("slot", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_what_is_wrong_with_a_slot_is_one_line_that_names_the_key(
    slot: dict[str, object], line: str
) -> None:
    written = {key: value for key, value in (MINIMAL | slot).items() if value is not None}
    with pytest.raises(InvalidSettingError) as caught:
        decode(merge_tables({"slots": [written]}, {}, {}, origin="file"))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_slot_needs_a_name_of_its_own() -> None:
    line = "slots[1].name: 'work' is the name of an earlier slot; each needs its own"
    assert api_error({}, {}) == line
    with pytest.raises(InvalidSettingError) as caught:
        decode(merge_tables({"slots": [MINIMAL, {"provider": "zai"}]}, {}, {}, origin="file"))
    assert str(caught.value) == "slots[1].name: is missing; write it"
    with pytest.raises(InvalidSettingError, match=r"^slots\[0\]: must be a table, not 3$"):
        decode(merge_tables({"slots": [3]}, {}, {}, origin="file"))


def test_more_slots_than_allowed_are_refused_with_what_to_raise() -> None:
    five = [{"name": f"s{number}"} for number in range(5)]
    assert api_error(*five) == (
        "slots: has 5 slots, and quota.max_slots is 4; raise it, or leave some out"
    )
    assert len(made(*five, quota={"max_slots": 5}).slots) == 5


@pytest.mark.parametrize(
    "slot",
    [
        {"base_url": "http://127.0.0.1:8080/"},
        {"base_url": "http://localhost:8080"},
        {"quota_url": "http://[::1]:1/q?x=1", "request_url": "https://h/r"},
        {"wake_times": ["09:00"]},
        {"provider": "anthropic", "wake_modes": ["interval"]},
        {"headers": {"x-api-key": "{key}", "org": "{env.ORG}"}},
        HTTP_JSON,
        HTTP_JSON
        | {"wake_modes": ["interval"], "request_url": "https://h/r", "wake_body": '{"a": 1}'},
    ],
    ids=str,
)
def test_what_can_be_used_is_taken(slot: dict[str, object]) -> None:
    assert only(slot).name == "work"


PLAIN = st.one_of(
    st.none(), st.text(max_size=8), st.integers(), st.booleans(), st.just("none"), st.floats()
)
VALUES = st.one_of(
    PLAIN,
    st.lists(PLAIN, max_size=3),
    st.dictionaries(st.text(max_size=4), PLAIN, max_size=2),
    st.sampled_from(["http://h", "https://h", "times", "zai", "http-json", "UTC", "/a/~b"]),
)
TABLES = st.dictionaries(
    st.one_of(st.sampled_from(SlotSettings.__struct_fields__), st.text(max_size=4)), VALUES
)


@given(tables=st.lists(st.one_of(TABLES, TABLES.map(lambda one: MINIMAL | one)), max_size=4))
@settings(deadline=None, max_examples=200)
def test_junk_is_refused_with_its_place_or_makes_slots(tables: list[dict[str, object]]) -> None:
    found = outcome({"slots": tables})
    if isinstance(found, Settings):
        assert list(found.slots) == [table["name"] for table in tables]
    else:
        assert found.field.startswith("slots")
        assert "\n" not in str(found)


# Keys.


def test_a_key_comes_from_its_variable_without_the_space_around_it() -> None:
    assert read_key(only({}), {"ZAI_KEY": f" {KEY}\n"}) == KEY


def test_a_key_file_is_read_anew_each_time(tmp_path: Path) -> None:
    path = tmp_path / "key"
    slot = SlotSettings(name="work", provider="zai", key_file=str(path))
    for key in (KEY, "another"):
        path.write_text(f"{key}\n")
        assert read_key(slot, {}) == key


def test_a_key_file_may_be_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").write_text(KEY)
    assert read_key(SlotSettings(name="work", provider="zai", key_file="~/key"), {}) == KEY


UNREADABLE: list[tuple[str | None, str]] = [
    (None, "slots.work.key_env: the variable ZAI_KEY is not set; set it where the service starts"),
    (" \n", "slots.work.key_env: the variable ZAI_KEY is empty; put the key there"),
    (f"{KEY}\n{KEY}", "slots.work.key_env: the variable ZAI_KEY does not hold just a key"),
    (f"Bearer {KEY}", "slots.work.key_env: the variable ZAI_KEY does not hold just a key"),
    (f"{KEY}é", "slots.work.key_env: the variable ZAI_KEY does not hold just a key"),
    (f"{KEY}\x00", "slots.work.key_env: the variable ZAI_KEY does not hold just a key"),
]


@pytest.mark.parametrize(("value", "line"), UNREADABLE, ids=[str(value) for value, _ in UNREADABLE])
def test_a_variable_that_holds_no_key_is_one_line_without_it(value: str | None, line: str) -> None:
    environ = {} if value is None else {"ZAI_KEY": value}
    with pytest.raises(InvalidSettingError) as caught:
        read_key(only({}), environ)
    assert str(caught.value).startswith(line)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda _: None, "cannot be read: No such file or directory"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (os.mkfifo, "cannot be read: it is not a regular file"),
        (lambda path: path.write_text(""), "is empty; put the key there"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "does not hold just a key"),
        (lambda path: path.write_text(f"{KEY} {KEY}"), "does not hold just a key"),
        (lambda path: path.write_text("x" * (MAX_KEY_BYTES + 1)), "has more than 16,384 bytes"),
    ],
    ids=["missing", "folder", "pipe", "empty", "bytes", "two keys", "large"],
)
def test_a_file_that_holds_no_key_is_one_line_without_it(
    make: object, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    assert callable(make)
    make(path)
    slot = SlotSettings(name="work", provider="zai", key_file=str(path))
    with pytest.raises(InvalidSettingError) as caught:
        read_key(slot, {})
    assert str(caught.value).startswith(f"slots.work.key_file: {path} {why}")
    assert "\n" not in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_slot_as_the_rules_see_it() -> None:
    found = made(
        {"wake_modes": ["times"], "wake_times": ["09:00"], "zone": "Europe/Berlin"},
        {"name": "plain", "enabled": False, "limit_type": "CREDIT_LIMIT", "limit_unit": 3},
        quota={"adaptive_polling": True, "wake_catch_up_minutes": 3},
    )
    work = slot_config(found, found.slots["work"], KEY)
    assert work.wake == WakeConfig(
        wake_modes=frozenset({WakeMode.TIMES}),
        wake_times=("09:00",),
        zone=ZoneInfo("Europe/Berlin"),
        wake_catch_up_minutes=3,
    )
    plain = slot_config(found, found.slots["plain"], KEY)
    assert (plain.is_enabled, plain.adaptive_polling) == (False, True)
    assert (plain.limit_type, plain.limit_unit, plain.wake.zone) == ("CREDIT_LIMIT", 3, UTC)


@pytest.mark.parametrize(
    ("slot", "source"),
    [
        ({}, "address"),
        (HTTP_JSON, "address"),
        ({"provider": "anthropic"}, "traffic"),
        ({"provider": "openai"}, "traffic"),
        ({"provider": "openai", "wake_modes": ["interval"]}, "traffic"),
        ({"provider": "anthropic", "quota_url": "https://h/q"}, "address"),
        ({"provider": "anthropic", "poll": "request"}, "requests"),
        ({"provider": "openai", "poll": "request"}, "requests"),
    ],
)
def test_no_quota_is_asked_for_with_requests_unless_the_settings_say_so(
    slot: dict[str, object], source: str
) -> None:
    found = made(slot)
    wake = slot_config(found, found.slots["work"], KEY).wake
    assert (wake.quota_from, wake.is_polled) == (source, source != "traffic")


def digests(slot: Mapping[str, object], key: str | None = KEY, **quota: object) -> tuple[str, str]:
    found = made(slot, quota=quota)
    config = slot_config(found, next(iter(found.slots.values())), key)
    return config.key_digest, config.settings_digest


def test_slots_of_one_key_at_one_place_have_one_digest() -> None:
    key_digest, _ = digests({})
    same: list[dict[str, object]] = [
        {"name": "other"},
        {"base_url": "https://api.z.ai/"},
        {"poll_interval_minutes": 5},
        {"wake_model": "glm-5"},
    ]
    assert {digests(slot)[0] for slot in same} == {key_digest}
    others = [
        digests({}, "another"),
        digests({"base_url": "https://open.bigmodel.cn"}),
        digests({"provider": "openai"}),
        digests({}, None),
        digests({"name": "other"}, None),
    ]
    assert len({key_digest, *(one for one, _ in others)}) == 6


def test_whatever_is_configured_for_a_slot_changes_its_digest() -> None:
    before = digests({})[1]
    changed = [
        digests({}, "another")[1],
        digests({}, None)[1],
        digests({"poll_interval_minutes": 5})[1],
        digests({"headers": {"a": "b"}})[1],
        digests({"enabled": False})[1],
        digests({}, max_consecutive_errors=3)[1],
    ]
    assert len({before, *changed}) == 7
    assert digests({}, max_slots=9, max_log_days=3)[1] == before


def test_no_digest_tells_the_key() -> None:
    found = made({})
    assert KEY not in repr(slot_config(found, found.slots["work"], KEY))
    assert len(digests({})[0]) == 32


def test_nothing_that_shows_settings_shows_a_secret_of_a_slot(tmp_path: Path) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text(
        '[[slots]]\nname = "work"\nprovider = "zai"\nkey_env = "ZAI_KEY"\n'
        f'quota_url = "https://h/q?token={KEY}"\n'
        f'headers = {{ x-secret = "{KEY}", x-api-key = "{{key}}" }}\n'
        f"""wake_body = '{{"api_key": "{KEY}", "model": "m"}}'\n"""
    )
    merged = merge(path, {"ZAI_KEY": KEY}, {})
    found = decode(merged)
    shown = displayed_settings(found, merged.origins)
    assert KEY not in repr(shown)
    assert shown["slots.work.key_env"].value == "ZAI_KEY"
    assert shown["slots.work.key_env"].origin == str(path)
    assert shown["slots.work.headers"].value == {"x-secret": "***", "x-api-key": "{key}"}
    assert '"model": "m"' in str(shown["slots.work.wake_body"].value)
    assert KEY not in repr(difference(Settings(), found))
    assert KEY not in repr(difference(found, Settings()))


# A file that is read again.


def test_slots_and_quota_change_without_a_restart() -> None:
    before = made({}, {"name": "left"})
    after = made({"poll_interval_minutes": 5}, {"name": "new"}, quota={"max_slots": 9})
    found = difference(before, after)
    assert {change.key for change in found.changed} == {
        "quota.max_slots",
        "slots.work.poll_interval_minutes",
        "slots.left",
        "slots.new",
    }
    assert not found.needs_restart
    assert applied_live(before, after).slots == after.slots


def test_a_slot_that_left_the_file_is_gone() -> None:
    before, after = loaded_from(made({}, {"name": "left"})), loaded_from(made({}))
    tables = reloaded_tables(before.tables, after.tables)
    assert list(decode(Merged(tables, {})).slots) == ["work"]


def test_settings_that_a_program_made_can_be_decoded_again() -> None:
    found = made({"wake_modes": ["interval"], "limit_type": "CREDIT", "limit_unit": "hours"})
    assert decode(Merged(loaded_from(found).tables, {})).slots == found.slots


# What names a slot.


def test_a_target_with_a_slot_that_is_not_configured_is_a_warning_where_others_are() -> None:
    targets = {"a": {"kind": "pull", "slot": "wrok"}, "b": {"kind": "pull", "slot": "work"}}
    raw: dict[str, object] = {"targets": targets}
    assert warnings_of(decode(merge_tables(raw, {}, {}, origin="file"))) == []
    assert warnings_of(made({}, targets=targets)) == [
        "targets.a.slot: no [[slots]] has the name 'wrok'; its quota is not read"
    ]


def test_a_target_that_writes_a_key_names_a_slot_that_has_one() -> None:
    command = {"kind": "command", "command": ["run"], "env": {"K": "{slot.key}"}}
    line = (
        "targets.a.slot: no [[slots]] has the name 'wrok', and {slot.key} needs its key; "
        "add it, or correct the name"
    )
    assert api_error({}, targets={"a": command | {"slot": "wrok"}}) == line
    assert api_error(targets={"a": command | {"slot": "wrok"}}) == line
    assert made({}, targets={"a": command | {"slot": "work"}}).targets["a"].slot == "work"
    named = command | {"slot": "wrok", "env": {"K": "{slot.name}"}}
    assert made({}, targets={"a": named}).targets["a"].slot == "wrok"


def test_a_target_may_name_a_provider_that_has_a_slot() -> None:
    targets = {"a": {"kind": "pull", "provider": "zai"}}
    assert made({}, targets=targets).targets["a"].provider == "zai"
    assert api_error({"provider": "openai"}, targets=targets) == (
        "targets.a.provider: no [[slots]] has the provider 'zai'; add one, or correct it"
    )
    both = {"a": {"kind": "pull", "provider": "zai", "slot": "work"}}
    line = "targets.a.provider: give either slot or provider, not both"
    assert api_error({}, targets=both) == line


def test_a_target_and_the_last_slot_of_its_provider_may_leave_the_file_together() -> None:
    before = loaded_from(made({}, targets={"a": {"kind": "pull", "provider": "zai"}}))
    after = merge_tables({}, {}, {}, origin="file")
    found = decode(Merged(reloaded_tables(before.tables, after.tables), {}))
    assert found.slots == {}
    assert found.targets["a"].status is Standing.DRAINING


def test_a_rate_limit_may_name_a_slot() -> None:
    found = made({}, rate_limits={"work": {"kind": "slot", "tokens_per_day": 5}})
    assert found.rate_limits["work"].kind == "slot"
    assert warnings_of(found) == []


def test_the_doctor_looks_for_keys_and_tells_none(tmp_path: Path) -> None:
    private, open_to_all = tmp_path / "private", tmp_path / "open"
    for path, mode in ((private, 0o600), (open_to_all, 0o644)):
        path.write_text(KEY)
        path.chmod(mode)
    slots = {
        "env": SlotSettings(name="env", provider="zai", key_env="ZAI_KEY"),
        "unset": SlotSettings(name="unset", provider="zai", key_env="OTHER_KEY"),
        "off": SlotSettings(name="off", provider="zai", key_env="OTHER_KEY", enabled=False),
        "private": SlotSettings(name="private", provider="zai", key_file=str(private)),
        "open": SlotSettings(name="open", provider="zai", key_file=str(open_to_all)),
        "gone": SlotSettings(name="gone", provider="zai", key_file=str(tmp_path / "gone")),
    }
    found = list(slot_findings(Settings(slots=slots), Environment({"ZAI_KEY": KEY})))
    assert [(one.check, one.verdict) for one in found] == [
        ("slot env", "ok"),
        ("slot unset", "fail"),
        ("slot off", "ok"),
        ("slot private", "ok"),
        ("slot open", "warn"),
        ("slot gone", "fail"),
    ]
    assert KEY not in msgspec.json.encode(found).decode()
