"""The sheet of colours: readable in light and dark, and never colour alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from headgate.api.schema.tasks import TokenBody
from headgate.core.slots.status import SlotState
from headgate.core.snapshot import ProjectStatus, Standing
from headgate.core.task import TaskStatus
from headgate.dashboard.dashboard import Rendering
from headgate.dashboard.static_files import StaticFiles
from headgate.storage.deliveries import DeliveryState

PAGES = Path(__file__).parents[2] / "src/headgate/dashboard"
SHEET = (PAGES / "static/headgate.css").read_text()
LEAST_CONTRAST = 4.5
TONES = ("good", "run", "wait", "warn", "bad", "off")

Colours = dict[str, str]


def colours_after(selector: str) -> Colours:
    """Return the colours of one theme."""
    block = SHEET[SHEET.index(selector) :]
    block = block[: block.index("}")]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))


LIGHT = colours_after(":root {")
DARK = colours_after(':root[data-theme="dark"]')
every_theme = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_dark_theme_is_the_same_by_choice_and_by_the_system() -> None:
    assert colours_after(':root:not([data-theme="light"])') == DARK
    assert set(DARK) == set(LIGHT)


@every_theme
def test_every_text_can_be_read_on_its_ground(theme: Colours) -> None:
    pairs = [
        (ink, ground) for ink in ("ink", "soft", "link") for ground in ("ground", "sheet", "sunken")
    ]
    pairs += [(tone, f"{tone}-ground") for tone in TONES]
    pairs += [(tone, "sheet") for tone in TONES]
    for ink, ground in pairs:
        assert contrast(theme[ink], theme[ground]) >= LEAST_CONTRAST, (ink, ground)


STATES = (
    *(status.value for status in TaskStatus),
    *(status.value for status in ProjectStatus),
    *(standing.value for standing in Standing),
    *(state.value for state in DeliveryState),
    *get_args(SlotState),
    *get_args(get_type_hints(TokenBody)["state"]),
)


@pytest.mark.parametrize("name", STATES)
def test_every_state_has_a_sign_of_its_own_beside_its_word(name: str) -> None:
    macros = Rendering(StaticFiles()).macros
    drawn = str(macros.state(name))
    sign = re.search(r'aria-hidden="true">(.)', drawn)
    assert sign is not None
    assert sign[1] != "·"
    assert drawn.endswith(f"</span> {name.replace('_', ' ')}</span>")
