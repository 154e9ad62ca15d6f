"""The record of a run: what is kept of it beside its tasks, so that it can be resumed and listed.

Rule: nothing secret is in it. Of the ledger and of a service it keeps where they are, without user
and password; keys and tokens come from the environment each time.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Literal

import msgspec

from headgate.redaction import hidden_address
from headgate.workflow.backend import Money
from headgate.workflow.report import RunState

# What a run is told beside its file: by the options of a command, or by a program.
#
# Rule: nothing of this is kept as it is. URLs may have a password in them and a token is a
# secret, so the record of a run keeps what it needs of it in its own words.

Tracker = Literal["local", "sqlite", "redis", "postgres"]


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was said; None is not said, and then the file or the environment decides.

    `micro_usd` is the limit of the workflow's own scope, and goes before that of the file.
    """

    data: Path
    config: Path | None = None
    tracker: Tracker | None = None
    redis_url: str | None = None
    postgres_url: str | None = None
    session_id: str | None = None
    session_micro_usd: int | None = None
    micro_usd: int | None = None
    concurrency: int | None = None
    server: str | None = None
    token: str | None = None
    project: str | None = None


FIRST_FORMAT = 1
FORMAT = 2
"""The newest format; a record has the oldest one that can hold it. 2 has revisions."""


class RunScope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One scope of a run as a whole path, and the limit that the run says it has."""

    scope: str
    micro_usd: int | None = None


class Revision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A corrected file that a resume took; `files` is the folder with its copy, in the run's.

    `changed` are the steps that it changed, `rerun` those whose finished runs began anew.
    """

    at: float
    source: str
    files: str
    changed: tuple[str, ...] = ()
    rerun: tuple[str, ...] = ()


class FirstGenerations(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From which generation on the tasks of a step count: done ones, and all others."""

    done: int = 0
    unfinished: int = 0


NO_GENERATIONS = FirstGenerations()


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run as `run.json` has it; times are Unix seconds.

    `source` is the file that it was made from, `folder` where its relative paths begin. `revisions`
    are the corrected files since, and `first_generations` say which tasks they made void. `scopes`
    are from the outermost to the workflow's own; `ledger` is the address of a ledger outside the
    run. `digests` are of the files that a resume reads, as they were made; `has_begun` says that
    the store or the journal was made, too. `server` to `concurrency` were said by options, and
    hold for a resume unless it says otherwise. `carried_seconds` is the time of all processes that
    have left it, `life_began_at` when the one began that has not, or that was killed. The rest is
    how the run stood when a process last left it.
    """

    id: str
    workflow: str
    created_at: float
    source: str
    folder: str
    format: int = FIRST_FORMAT
    revisions: tuple[Revision, ...] = ()
    first_generations: dict[str, FirstGenerations] = {}
    total: int = 0
    digests: dict[str, str] = {}
    has_begun: bool = False
    scopes: tuple[RunScope, ...] = ()
    tracker: Tracker | None = None
    ledger: str = ""
    server: str | None = None
    project: str | None = None
    config: str | None = None
    session_id: str | None = None
    session_micro_usd: int | None = None
    micro_usd: int | None = None
    concurrency: int | None = None
    carried_seconds: float = 0.0
    life_began_at: float | None = None
    state: RunState = RunState.RUNNING
    ended: int = 0
    done: int | None = None
    ended_at: float | None = None
    exhausted_by: str | None = None
    spent_micro_usd: int | None = None
    unbooked_micro_usd: int = 0
    money: tuple[Money, ...] = ()

    @property
    def file(self) -> str:
        """The file that the run goes by now."""
        return self.revisions[-1].source if self.revisions else self.source

    @property
    def files(self) -> str:
        """The folder of its copies, within that of the run."""
        return self.revisions[-1].files if self.revisions else ""

    def seconds_until(self, moment: float) -> float:
        """Return how long processes have carried the run, if the latest one did until a moment."""
        if self.life_began_at is None:
            return self.carried_seconds
        return self.carried_seconds + max(0.0, moment - self.life_began_at)


def new_run_id(now: float) -> str:
    """Return an id that sorts by time; a beginning of it is enough to be typed.

    Many machines may begin runs in the same second, and money in a ledger that they share is held
    under names that begin with this one. So it is long enough that no two are ever the same.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(5)}"


def recorded(record: RunRecord, options: RunOptions) -> RunRecord:
    """Return a record with what of the options is to hold for later."""
    return msgspec.structs.replace(
        record,
        server=None if options.server is None else hidden_address(options.server),
        project=options.project,
        config=None if options.config is None else str(options.config.absolute()),
        session_id=options.session_id,
        session_micro_usd=options.session_micro_usd,
        micro_usd=options.micro_usd,
        concurrency=options.concurrency,
    )


def resumed_options(record: RunRecord, given: RunOptions) -> RunOptions:
    """Return the options of a resume: what is said now, otherwise what was said before.

    Amounts are not said again: their scopes are kept, and what is in force for them may have been
    changed on purpose.
    """
    names = ("server", "project", "concurrency")
    kept = {name: getattr(record, name) for name in names if getattr(given, name) is None}
    if given.config is None and record.config is not None:
        kept["config"] = type(given.data)(record.config)
    if given.tracker is None:
        kept["tracker"] = record.tracker
    return msgspec.structs.replace(given, **kept)
