"""What a run is told beside its file: by the options of a command, or by a program.

Rule: nothing of this is kept as it is. URLs may have a password in them and a token is a secret, so
the record of a run keeps what it needs of it in its own words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

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
