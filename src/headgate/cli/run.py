"""`headgate run`: a workflow from a file, carried out here or on a service, inside its budgets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headgate.cli.connection import json_option
from headgate.cli.runs import offered_runs
from headgate.errors import InvalidSettingError

if TYPE_CHECKING:
    from headgate.workflow.run_metrics import RunMetrics
    from headgate.workflow.run_record import RunOptions


TRACKERS = ("local", "sqlite", "redis", "postgres")
MOST_AT_ONCE = 10_000
MOST_PORT = 65_535

_path = click.Path(path_type=Path)


@click.command(
    epilog="""\b
Examples:
  headgate run eval.yaml
  headgate run eval.yaml --dry-run
  headgate run eval.yaml --concurrency 20 --budget-usd 2.50
  headgate run eval.yaml --budget-tracker redis \\
      --budget-redis-url redis://127.0.0.1:6379/0 \\
      --budget-session-id eval-2026-04-12 --budget-session-limit 50
  headgate run eval.yaml --server http://127.0.0.1:7420 --json
  headgate run --resume last
  headgate run eval.yaml --resume last

\b
Exit codes: 0 done; 1 steps failed, or the run cannot go on; 2 the file or an option is
wrong, and nothing ran; 3 the service does not answer; 4 the token does not allow it; 6 a
budget is used up; 130 Ctrl-C.
"""
)
@click.argument("file", metavar="[FILE]", required=False, type=_path)
@click.option("--budget-tracker", type=click.Choice(TRACKERS), help="The kind of ledger.")
@click.option("--budget-redis-url", metavar="URL", help="A ledger in Redis or Valkey.")
@click.option("--budget-postgres-url", metavar="URL", help="A ledger in PostgreSQL.")
@click.option("--budget-session-id", metavar="NAME", help="The session that the run belongs to.")
@click.option("--budget-session-limit", metavar="USD", help="The most that the session may spend.")
@click.option("--budget-usd", metavar="USD", help="The most that the workflow may spend.")
@click.option(
    "--concurrency",
    metavar="N",
    type=click.IntRange(1, MOST_AT_ONCE),
    help="How many steps run at once.  [default: the file's, or 8]",
)
@click.option(
    "--data",
    metavar="DIR",
    type=_path,
    help="Where runs are kept.  [default: the XDG data directory]",
)
@click.option(
    "--config", metavar="FILE", type=_path, help="The settings file, for steps that name a target."
)
@click.option("--server", metavar="URL", help="Run the steps on this service.")
@click.option(
    "--token",
    metavar="TOKEN",
    help="The token for the service.  [default: HEADGATE_TOKEN, or its file]",
)
@click.option("--project", metavar="NAME", help="The project whose share and budget the run uses.")
@click.option(
    "--metrics-file", metavar="PATH", type=_path, help="Write metrics for Prometheus to this file."
)
@click.option(
    "--metrics-port",
    metavar="N",
    type=click.IntRange(0, MOST_PORT),
    help="Serve metrics on this port; 0 picks a free one.",
)
@click.option(
    "--dry-run", "is_dry", is_flag=True, help="Show what the run would do and cost; run nothing."
)
@click.option(
    "--resume",
    metavar="RUN",
    shell_complete=offered_runs,
    help="Continue this run: an id, the beginning of an id, or last.",
)
@click.option(
    "--changed",
    type=click.Choice(("keep", "rerun")),
    help="What to do with finished steps that a corrected FILE changes.",
)
@json_option
@click.pass_context
def run(
    context: click.Context,
    /,
    *,
    file: Path | None,
    is_dry: bool,
    resume: str | None,
    as_json: bool,
    **given: Any,  # noqa: ANN401 - further options, checked as they are read
) -> None:
    """Run a workflow from a file, within its budgets.

    FILE lists steps: commands, HTTP requests, Python functions, calls to models, tasks for targets.
    --resume continues an interrupted run and keeps its finished steps; with FILE, the other steps
    are those of the corrected file. Progress goes to standard error, the report to standard output.
    """
    _check(file, resume, is_dry=is_dry, given=given)
    # A list of commands loads none of this.
    options = _options(given)
    if is_dry and file is not None:
        from headgate.cli.dry_run import print_dry_run  # noqa: PLC0415

        context.exit(print_dry_run(file, options, as_json=as_json))
    from headgate.cli.run_session import run_workflow  # noqa: PLC0415

    metrics = _metrics(given)
    try:
        code = run_workflow(
            file,
            options,
            resume=resume,
            changed=given["changed"],
            as_json=as_json,
            metrics=metrics,
        )
    finally:
        if metrics is not None:
            metrics.close()
    context.exit(code)


def _check(file: Path | None, resume: str | None, *, is_dry: bool, given: dict[str, Any]) -> None:
    if file is None and resume is None:
        message = "FILE is missing; name a workflow, or a run to go on with by --resume"
        raise click.UsageError(message)
    if given["changed"] is not None and (file is None or resume is None):
        problem = "is for a resume with a corrected file; give --resume and FILE"
        raise InvalidSettingError("--changed", problem)
    if resume is not None and is_dry:
        raise InvalidSettingError("--dry-run", "is for a file; leave out --resume")
    for name in ("metrics_file", "metrics_port"):
        if is_dry and given[name] is not None:
            raise InvalidSettingError(_option(name), "is for a run; leave out --dry-run")
    if given["server"] is not None:
        _check_service(given)
    elif resume is None:
        for name in ("token", "project"):
            if given[name] is not None:
                raise InvalidSettingError(_option(name), "is for a service; name one with --server")


def _check_service(given: dict[str, Any]) -> None:
    for name in ("budget_tracker", "budget_redis_url", "budget_postgres_url"):
        if given[name] is not None:
            raise InvalidSettingError(_option(name), "the service keeps the ledger; leave it out")
    if given["config"] is not None:
        raise InvalidSettingError("--config", "the service has its own settings; leave it out")


def _options(given: dict[str, Any]) -> RunOptions:
    from headgate.cli.connection import chosen_directory  # noqa: PLC0415
    from headgate.workflow.run_record import RunOptions  # noqa: PLC0415

    data: Path | None = given["data"]
    return RunOptions(
        data=chosen_directory(data),
        config=given["config"],
        tracker=given["budget_tracker"],
        redis_url=given["budget_redis_url"],
        postgres_url=given["budget_postgres_url"],
        session_id=given["budget_session_id"],
        session_micro_usd=_amount(given, "budget_session_limit"),
        micro_usd=_amount(given, "budget_usd"),
        concurrency=given["concurrency"],
        server=given["server"],
        token=given["token"],
        project=given["project"],
    )


def _metrics(given: dict[str, Any]) -> RunMetrics | None:
    file, port = given["metrics_file"], given["metrics_port"]
    if file is None and port is None:
        return None
    # It brings the client of Prometheus along, which most runs do without.
    from headgate.workflow.run_metrics import RunMetrics  # noqa: PLC0415

    return RunMetrics(file=file, port=port)


def _amount(given: dict[str, Any], name: str) -> int | None:
    from headgate.core.money import to_written_limit_micro_usd  # noqa: PLC0415

    text: str | None = given[name]
    return None if text is None else to_written_limit_micro_usd(text, field=_option(name))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
