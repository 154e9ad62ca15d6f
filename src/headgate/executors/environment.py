"""What the environment gives to a target: the values of `{env.NAME}`, the keys of its slots.

Rule: a value from the environment is written where the configuration wants it and nowhere else. No
error repeats one: a variable that is missing is named, and a text that somebody sent back is
cleaned before it becomes the error of a task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from headgate.errors import InvalidSettingError
from headgate.redaction import MIN_SECRET_LENGTH

PREFIX = "env."
VARIABLE = re.compile(r"\{env\.(\w+)\}")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.]*)\}")
_KEY_SHOWN = "{slot.key}"
MAX_KEYS = 1_000
"""How many keys of slots are remembered; they change, and the oldest make room for new ones."""

SlotKeys = Callable[[str], str]
"""Reads the key of a slot by its name, or raises `InvalidSettingError`."""


def no_slot_keys(slot: str) -> str:
    """Read no key: there are no slots here."""
    problem = f"there is no slot {slot!r} here to read the key of; add it to the file"
    raise InvalidSettingError("slots", problem)


class Environment:
    """Fills settings of one target, and remembers what it gave out.

    With `has_slot` its tasks have slots, whose keys `slot_keys` reads.
    """

    def __init__(
        self,
        variables: Mapping[str, str],
        *,
        has_slot: bool = False,
        slot_keys: SlotKeys = no_slot_keys,
    ) -> None:
        self._variables = variables
        self._has_slot = has_slot
        self._slot_keys = slot_keys
        self._given: dict[str, str] = {}
        self._keys: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Environment({', '.join(sorted(self._given.values()))})"

    def value(self, name: str, *, setting: str) -> str:
        """Return the variable that a setting needs."""
        value = self._variables.get(name)
        if value is None:
            advice = "set it, or take it out of the setting"
            raise InvalidSettingError(
                setting, f"the environment variable {name} is not set; {advice}"
            )
        self.hide(value, f"{{{PREFIX}{name}}}")
        return value

    def hide(self, value: str, placeholder: str) -> None:
        """Remember a secret; the first placeholder that it got is the one that is shown."""
        if len(value) >= MIN_SECRET_LENGTH:
            self._given.setdefault(value, placeholder)

    def check_slot(self, setting: str) -> None:
        """Refuse a setting that has a place for a slot, at a target whose tasks have none."""
        if not self._has_slot:
            problem = "has a place for a slot, and the target names none; write slot or provider"
            raise InvalidSettingError(setting, problem)

    def key_of(self, slot: str) -> str:
        """Read the key of a slot, and remember it as a secret."""
        key = self._slot_keys(slot)
        if len(key) >= MIN_SECRET_LENGTH:
            self._keys.pop(key, None)
            self._keys[key] = _KEY_SHOWN
            if len(self._keys) > MAX_KEYS:
                del self._keys[next(iter(self._keys))]
        return key

    def filled(self, text: str, *, setting: str) -> str:
        """Put variables into a text, where only `{env.NAME}` is a placeholder."""

        def value_of(match: re.Match[str]) -> str:
            name = match[1]
            if not name.startswith(PREFIX):
                raise InvalidSettingError(
                    setting, f"{{{name}}} is not {{env.NAME}}; name a variable"
                )
            return self.value(name.removeprefix(PREFIX), setting=setting)

        return _PLACEHOLDER.sub(value_of, text)

    def cleaned(self, text: str) -> str:
        """Return a text with every value that was given out replaced by its placeholder."""
        # A value may contain another; the longer one goes first, or its rest would be shown.
        given = self._given | self._keys if self._keys else self._given
        for value in sorted(given, key=len, reverse=True):
            text = text.replace(value, given[value])
        return text
