"""Every number of the settings has a range, and what is outside is one line that says so.

The table is made from the types of the settings, so that a new setting is in it by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import inspect

from config.running import FAST, running
from headgate.config import load_settings
from headgate.config.messages import described_type
from headgate.config.settings import NAMED_TABLES, TABLES, Settings
from headgate.errors import InvalidSettingError

CONTEXTS: dict[str, tuple[tuple[str, ...], str]] = {
    "rate_limits": (("rate_limits", "x"), "[rate_limits.x]"),
    "projects": (("projects", "x"), "[projects.x]"),
    "agents": (("agents", "x"), "[agents.x]"),
    "budgets": (("budgets", "session:x"), '[budgets."session:x"]'),
    "prices": (("prices", "x"), "[prices.x]"),
    "slots": (("slots", "x"), "[[slots]]\nname = 'x'\nprovider = 'zai'\nkey_env = 'K'"),
    "upstreams": (("upstreams", "x"), "[upstreams.x]\nkind = 'openai'"),
    "models": (("models", "x"), "[models.x]\nroute = ['openai/x']"),
}
"""How a table of each section is begun, so that one more key makes it whole."""

TARGETS = {
    "http": "[targets.x]\nkind = 'http'\nurl = 'http://127.0.0.1/'",
    "command": "[targets.x]\nkind = 'command'\ncommand = ['true']",
    "callable": "[targets.x]\nkind = 'callable'\nentry_point = 'os:getcwd'",
    "pull": "[targets.x]\nkind = 'pull'",
    "gateway": "[targets.x]\nkind = 'gateway'",
    "ray": "[targets.x]\nkind = 'ray'\ncommand = ['true']",
}

FREE = {"limit_unit"}
"""Numbers that name something and measure nothing."""


class Number(NamedTuple):
    """One number of the settings: its key, how its table begins, and its type."""

    parts: tuple[str, ...]
    header: str
    info: Any
    annotation: Any

    @property
    def key(self) -> str:
        """The key as messages have it."""
        return ".".join(f'"{part}"' if ":" in part else part for part in self.parts)

    @property
    def variable(self) -> str | None:
        """The variable that sets it, if one does."""
        if self.parts[0] not in TABLES:
            return None
        return f"HEADGATE_{self.parts[0]}__{self.parts[1]}".upper()

    def outside(self) -> Iterator[tuple[str, float]]:
        """Return values that the range does not have, as the file writes them."""
        info = self.info
        assert info.le is not None, f"{self.key} has no upper end"
        assert info.ge is not None or info.gt is not None, f"{self.key} has no lower end"
        lower = info.ge if info.ge is not None else info.gt
        assert lower is not None
        if lower > 0 or info.gt == 0:
            yield "0", 0
        yield str(int(info.le) + 1), int(info.le) + 1
        yield "-1", -1
        yield "nan", math.nan
        yield "inf", math.inf
        yield "-inf", -math.inf


def _numbers_of(kind: Any, parts: tuple[str, ...], header: str) -> Iterator[Number]:
    for field in msgspec.structs.fields(kind):
        info = inspect.type_info(field.type)
        members = info.types if isinstance(info, inspect.UnionType) else (info,)
        if field.name in FREE or any(isinstance(one, inspect.StrType) for one in members):
            continue
        for one in members:
            if isinstance(one, inspect.IntType | inspect.FloatType):
                yield Number((*parts, field.name), header, one, field.type)


def _tables() -> Iterator[tuple[Any, tuple[str, ...], str]]:
    """Return every table of the settings: its type, its key, and how it begins."""
    for section, kind in TABLES.items():
        yield kind, (section,), f"[{section}]"
    types = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    for section in NAMED_TABLES:
        value = inspect.type_info(types[section])
        assert isinstance(value, inspect.DictType)
        members: tuple[Any, ...] = getattr(value.value_type, "types", (value.value_type,))
        for member in members:
            parts, header = CONTEXTS.get(section, ((section, "x"), ""))
            yield member.cls, parts, header or TARGETS[str(member.tag)]


NUMBERS = [number for table in _tables() for number in _numbers_of(*table)]


def test_the_table_has_every_section_with_numbers() -> None:
    assert {number.parts[0] for number in NUMBERS} >= {
        "scheduler",
        "quota",
        "server",
        "webhooks",
        "rate_limits",
        "targets",
        "projects",
        "agents",
        "budgets",
        "slots",
        "gateway",
        "upstreams",
    }
    assert len(NUMBERS) > 50


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.key)
def test_a_number_outside_its_range_is_refused_with_the_range_and_the_place(
    number: Number, tmp_path: Path
) -> None:
    path = tmp_path / "headgate.toml"
    wanted = f"must be {described_type(number.annotation)}"
    wrong = [written for written, _ in number.outside()] + ["true", "[1]", "'many'"]
    for written in wrong:
        text = f"# a comment\n{number.header}\n{number.parts[-1]} = {written}\n"
        path.write_text(text)
        with pytest.raises(InvalidSettingError) as caught:
            load_settings(path, {}, {})
        line = str(caught.value)
        assert line.startswith(f"{number.key}: {wanted}"), line
        assert line.endswith(f"({path}, line {text.count(chr(10))})"), line


@pytest.mark.parametrize(
    "number", [one for one in NUMBERS if one.variable], ids=lambda number: number.key
)
def test_a_variable_and_an_option_outside_the_range_are_refused(number: Number) -> None:
    wanted = f"must be {described_type(number.annotation)}"
    for written, value in number.outside():
        with pytest.raises(InvalidSettingError) as caught:
            load_settings(None, {str(number.variable): written}, {})
        assert str(caught.value).startswith(f"{number.variable}: {wanted}"), written
        with pytest.raises(InvalidSettingError) as caught:
            load_settings(None, {}, {number.key: value})
        assert str(caught.value).startswith(f"{number.key}: {wanted}"), written
        assert str(caught.value).endswith("(given as an option)")


def _is_dollars(info: inspect.Type) -> bool:
    members = {type(one) for one in info.types} if isinstance(info, inspect.UnionType) else set()
    return members >= {inspect.StrType, inspect.FloatType}


def _dollars() -> Iterator[tuple[str, str]]:
    """Return each key that is dollars, with its table but for this key."""
    for kind, parts, header in _tables():
        fields = msgspec.structs.fields(kind)
        for field in fields:
            if _is_dollars(inspect.type_info(field.type)):
                needed = [one.name for one in fields if one.required and one is not field]
                beside = "".join(f"\n{name} = 1" for name in needed if f"{name} =" not in header)
                yield Number((*parts, field.name), header, None, None).key, header + beside


DOLLARS = list(_dollars())


def test_the_table_has_all_that_is_dollars() -> None:
    keys = {key.rpartition(".")[2] for key, _ in DOLLARS}
    assert keys >= {"limit_usd", "estimate_usd", "input", "output", "cached_input", "cache_write"}


@pytest.mark.parametrize("written", ["-1", "nan", "inf", "'-0.01'", "'x'", "1e30"])
@pytest.mark.parametrize(("key", "header"), DOLLARS)
def test_dollars_outside_their_range_are_refused(
    key: str, header: str, written: str, tmp_path: Path
) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text(f"{header}\n{key.rpartition('.')[2]} = {written}\n")
    with pytest.raises(InvalidSettingError) as caught:
        load_settings(path, {}, {})
    line = str(caught.value)
    assert line.startswith(f"{key}: must be dollars from 0 to 1,000,000"), line
    assert line.endswith(f"({path}, line {path.read_text().count(chr(10))})"), line


async def test_in_a_hot_reload_a_zero_keeps_what_was_and_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + "max_inflight = 7\n") as service:
        service.path.write_text(FAST + "max_inflight = 0\nmax_per_agent = 9\n")
        answer = (await service.ask("POST", "/scheduler/reload")).json
        assert [change["key"] for change in answer["changed"]] == ["scheduler.max_per_agent"]
        assert answer["kept"] == ["scheduler.max_inflight"]
        assert service.service.config.settings.scheduler.max_inflight == 7
        service.path.write_text(FAST + "[projects.a]\nmax_concurrent_agents = 0\n")
        refused = await service.ask("POST", "/scheduler/reload")
        assert refused.status == 422
        line = refused.problem["error"]
        assert line.startswith("projects.a.max_concurrent_agents: must be a whole number from 1")
        assert line.endswith("line 5)"), line
