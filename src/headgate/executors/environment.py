"""What the environment gives to a target: the values of `{env.NAME}`, the keys of its slots.

Rule: a value from the environment is written where the configuration wants it and nowhere else. No
error repeats one: a variable that is missing is named, and a text that somebody sent back is
cleaned before it becomes the error of a task, and before any of it is cut off: half a value could
not be told from other text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from headgate.errors import InvalidSettingError
from headgate.redaction import MIN_SECRET_LENGTH, written_forms

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
        self._hidden: dict[str, str] | None = None

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
        if len(value) >= MIN_SECRET_LENGTH and value not in self._given:
            self._given[value] = placeholder
            self._hidden = None

    def check_slot(self, setting: str) -> None:
        """Refuse a setting that has a place for a slot, at a target whose tasks have none."""
        if not self._has_slot:
            problem = "has a place for a slot, and the target names none; write slot or provider"
            raise InvalidSettingError(setting, problem)

    def key_of(self, slot: str) -> str:
        """Read the key of a slot, and remember it as a secret."""
        key = self._slot_keys(slot)
        if len(key) >= MIN_SECRET_LENGTH:
            is_new = self._keys.pop(key, None) is None
            self._keys[key] = _KEY_SHOWN
            if is_new:
                self._hidden = None
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
        for form, placeholder in self._forms().items():
            text = text.replace(form, placeholder)
        return text

    @property
    def longest_bytes(self) -> int:
        """How long a value that was given out can be, in whatever way it is written."""
        return max(map(len, map(_bytes_of, self._forms())), default=0)

    def cleaned_end(self, raw: bytes, length: int) -> str:
        """Return the end of a text, so many bytes or a few more, without any part of a value.

        What is before it must be as long as the longest value, or be all that there is.
        """
        start = max(0, len(raw) - length)
        for form in map(_bytes_of, self._forms()):
            # A value that lies across the beginning is taken whole, so that it is found below.
            found = raw.find(form, max(0, start - len(form) + 1), start + len(form) - 1)
            if found >= 0:
                start = found
        return self.cleaned(raw[start:].decode(errors="replace"))

    def _forms(self) -> dict[str, str]:
        """Return the placeholders of all ways to write a value."""
        if self._hidden is None:
            found: dict[str, str] = {}
            for value, placeholder in (self._given | self._keys).items():
                for form in written_forms(value):
                    found.setdefault(form, placeholder)
            # A value may contain another; the longer one goes first, or its rest would be shown.
            self._hidden = {form: found[form] for form in sorted(found, key=len, reverse=True)}
        return self._hidden


def _bytes_of(form: str) -> bytes:
    """Return a text from the environment as a program writes it, which need not be UTF-8."""
    return form.encode(errors="surrogateescape")
