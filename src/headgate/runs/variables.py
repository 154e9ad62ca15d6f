"""Variables of the environment in the texts of a workflow: looked up when work is carried out.

Rule: a value that was given out is taken out again of everything that becomes an error, so that it
is never kept; a variable that is missing is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from headgate.executors.environment import Environment
from headgate.workflow.texts import EnvPlace, FilledText, Text, references, with_variables


class Variables:
    """The environment of a run, as its steps may see it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self._environment = Environment(environ)

    def __repr__(self) -> str:
        return f"Variables({self._environment!r})"

    def filled(self, text: FilledText, setting: str) -> str:
        """Put variables into a text, or raise `InvalidSettingError` for one that is not set."""
        return with_variables(text, partial(self._value, setting))

    def fixed(self, text: Text, setting: str) -> str | None:
        """Return a text as it is in every run of its step; None if it depends on more."""
        if any(not isinstance(place, EnvPlace) for place in references(text)):
            return None
        return "".join(
            [self._value(setting, part) if isinstance(part, EnvPlace) else str(part)
             for part in text.parts]
        )  # fmt: skip

    def check(self, text: Text, setting: str) -> None:
        """Raise `InvalidSettingError` for a variable of a text that is not set."""
        for place in references(text):
            if isinstance(place, EnvPlace):
                self._value(setting, place)

    def cleaned(self, text: str) -> str:
        """Return a text without the values that were given out."""
        return self._environment.cleaned(text)

    @property
    def longest_bytes(self) -> int:
        """How long a value that was given out can be, in whatever way it is written."""
        return self._environment.longest_bytes

    def cleaned_end(self, raw: bytes, length: int) -> str:
        """Return the end of a text without the values that were given out, or any part of one."""
        return self._environment.cleaned_end(raw, length)

    def hide(self, value: str, shown: str) -> None:
        """Remember a secret that came with no variable."""
        self._environment.hide(value, shown)

    def _value(self, setting: str, place: EnvPlace) -> str:
        if place.default is not None and not self.environ.get(place.name):
            return place.default
        return self._environment.value(place.name, setting=setting)
