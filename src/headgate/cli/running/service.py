"""Runs on a service: its address and the token for it, from where all commands have them."""

from __future__ import annotations

from headgate.cli.places.connection import TOKEN_FILE, Connection, found_service
from headgate.runs.budgets import said_by, scopes_again
from headgate.runs.kept.files import JOURNAL
from headgate.runs.kept.folder import Run
from headgate.runs.options import RunOptions
from headgate.runs.remote.backend import ServerBackend
from headgate.runs.remote.tasks import check_for_service


def found_address(options: RunOptions) -> tuple[str, str | None]:
    """Return the whole address of the service that options name, and the token for it."""
    # The directory may be one for runs alone, which has no token in it.
    data = options.data if (options.data / TOKEN_FILE).exists() else None
    return found_service(Connection(options.server, options.token, data))


def service_backend(run: Run, options: RunOptions, *, sets_own_limit: bool) -> ServerBackend:
    """Return what has a service carry out a run; what no service runs is refused at once."""
    check_for_service(run.workflow, run.workflow.file)
    url, token = found_address(options)
    scopes = scopes_again(run.record, options)
    return ServerBackend(
        url,
        run_id=run.id,
        workflow=run.workflow,
        scopes=scopes,
        journal=run.path / JOURNAL,
        token=token,
        project_id=options.project,
        sets_own_limit=sets_own_limit,
        said_by=said_by(scopes, options),
    )
