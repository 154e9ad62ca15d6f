"""What the environment gives to a target: the values of `{env.NAME}`, and the secrets among them.

Rule: a value from the environment is written where the configuration wants it and nowhere else. No
error repeats one: a variable that is missing is named, and a text that somebody sent back is
cleaned before it becomes the error of a task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headgate.errors import InvalidSettingError

PREFIX = "env."
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.]*)\}")
# Replacing a shorter value would tear up innocent text, and none so short is a secret.
_LEAST_SECRET_LENGTH = 4


class Environment:
    """Fills settings of one target, and remembers what it gave out."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._given: dict[str, str] = {}

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
        if len(value) >= _LEAST_SECRET_LENGTH:
            self._given.setdefault(value, placeholder)

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
        for value in sorted(self._given, key=len, reverse=True):
            text = text.replace(value, self._given[value])
        return text
