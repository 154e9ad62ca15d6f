"""What a resume may say: options that a run cannot change any more are refused, one line each.

Rule: no option is passed over in silence. Saying again what the run was begun with is fine.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.core.budgets.scopes import Scope, leaf_kind, leaf_name
from headgate.errors import InvalidSettingError
from headgate.runs.budgets import SESSION
from headgate.runs.kept.record import RunRecord
from headgate.runs.options import RunOptions


def check_resume(record: RunRecord, given: RunOptions) -> None:
    """Refuse options that say something else than what a run was begun with."""
    _check_place(record, given)
    _check_session(record, given)
    if record.server is None:
        _check_books(record, given)


def _check_place(record: RunRecord, given: RunOptions) -> None:
    if record.server is None:
        here = "the run was begun on this machine, and goes on where it was begun; leave it out"
        service = {"--server": given.server, "--token": given.token, "--project": given.project}
        _refuse(service, here)
        return
    books = {
        "--budget-tracker": given.tracker,
        "--budget-redis-url": given.redis_url,
        "--budget-postgres-url": given.postgres_url,
    }
    _refuse(books, "the service that has the run keeps the books; leave it out")
    _refuse({"--config": given.config}, "the service has its own settings; leave it out")


def _check_session(record: RunRecord, given: RunOptions) -> None:
    around = [Scope(one.scope) for one in record.scopes[:-1]]
    names = [leaf_name(scope) for scope in around if leaf_kind(scope) == SESSION]
    if given.session_id is not None and given.session_id not in names:
        whose = f"the run is part of session {names[0]}" if names else "the run has no session"
        problem = f"{whose}, and what it has spent is booked there; leave it out"
        raise InvalidSettingError("--budget-session-id", problem)
    if given.session_micro_usd is not None and not names:
        problem = "the run has no session that it could limit; leave it out"
        raise InvalidSettingError("--budget-session-limit", problem)


def _check_books(record: RunRecord, given: RunOptions) -> None:
    tracker = record.tracker or "local"
    whose = "by the run itself" if tracker == "local" else f"in {record.books}"
    kept = f"the books of the run are kept {whose}, and only they know what it has spent"
    if given.tracker not in (None, tracker):
        raise InvalidSettingError("--budget-tracker", f"{kept}; leave it out")
    for kind, url in {"redis": given.redis_url, "postgres": given.postgres_url}.items():
        if kind != tracker:
            _refuse({f"--budget-{kind}-url": url}, f"{kept}; leave it out")


def _refuse(options: Mapping[str, object], problem: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise InvalidSettingError(option, problem)
