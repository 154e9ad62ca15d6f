"""What the last reload of this node came to, for whoever asks later.

A file is read again by itself when it has changed, and then nobody waits for an answer. Where a
person had it read before, that finds nothing new, and what the person's reload changed is still the
news. Rule: what is noted has no secret in it, since it is made of what a reload answers with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from headgate.audit import FILE, Actor
from headgate.errors import InvalidSettingError
from headgate.settings.changes import Change, Difference


class ReloadNote(msgspec.Struct, frozen=True, kw_only=True):
    """When the settings were read again, for whom, and what that changed; or the `problem`."""

    at: float
    by: str
    changed: tuple[Change, ...] = ()
    problem: str = ""


class ReloadNotes:
    """Notes the last reload; `last` is None until there is one."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.last: ReloadNote | None = None

    async def note(
        self, actor: Actor, reload: Callable[[Actor], Awaitable[Difference]]
    ) -> Difference:
        """Reload, and note what came of it."""
        try:
            found = await reload(actor)
        except InvalidSettingError as error:
            self.last = ReloadNote(at=self._now(), by=actor.name, problem=str(error))
            raise
        if actor is not FILE or found.changed or self.last is None or self.last.problem:
            self.last = ReloadNote(at=self._now(), by=actor.name, changed=found.changed)
        return found
