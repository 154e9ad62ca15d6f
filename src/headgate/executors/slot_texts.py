"""Texts with places for the slot of an attempt: `{slot.name}`, and `{slot.key}` for its key.

Rule: a key is read when an attempt needs it, written where the configuration wants it and nowhere
else. It is remembered only so that it can be taken out of what somebody sends back.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from headgate.errors import InvalidSettingError
from headgate.executor import WorkOrder
from headgate.executors.environment import Environment

NAME = "slot.name"
KEY = "slot.key"
_PLACES = re.compile(rf"\{{({re.escape(NAME)}|{re.escape(KEY)})\}}")

Written = Callable[[str], str]


def uses_slot(text: str) -> bool:
    """Tell whether a text has a place for something of a slot."""
    return _PLACES.search(text) is not None


class SlotText:
    """A text that is filled for each attempt; variables are filled once."""

    def __init__(self, text: str, *, setting: str, environment: Environment) -> None:
        environment.check_slot(setting)
        self._setting = setting
        self._environment = environment
        # Odd pieces are the names within braces.
        self._pieces = [
            piece if position % 2 else environment.filled(piece, setting=setting)
            for position, piece in enumerate(_PLACES.split(text))
        ]

    def sample(self) -> str:
        """Return the text as it may look, to be checked before there is a task."""
        return self._joined("x", lambda: "x")

    def filled(self, order: WorkOrder, *, written: Written = str) -> str:
        """Return the text for one attempt, or raise `InvalidSettingError` if there is no key.

        `written` turns the name into what may stand there.
        """
        slot = order.slot
        if slot is None:
            raise InvalidSettingError(self._setting, "needs a slot, and the task has none")
        return self._joined(written(slot), lambda: self._environment.key_of(slot))

    def _joined(self, name: str, read_key: Callable[[], str]) -> str:
        return "".join(
            self._place(piece, name, read_key) if position % 2 else piece
            for position, piece in enumerate(self._pieces)
        )

    def _place(self, piece: str, name: str, read_key: Callable[[], str]) -> str:
        return name if piece == NAME else read_key()
