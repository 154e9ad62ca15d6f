"""`headgate runs`: which runs of workflows there are, and how one of them stands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headgate.cli.connection import default_directory, json_option
from headgate.cli.main import EXIT_FAILED
from headgate.cli.output import is_terminal, print_json, print_json_lines, print_tables, run_json
from headgate.core.text import printable
from headgate.errors import InvalidSettingError

if TYPE_CHECKING:
    from headgate.workflow.run_list import RunSummary, ShownRun, StepOutput


# The ids of runs, offered by the Tab key: read from the names of folders and nothing else.

MOST_OFFERED = 50
RUNS = "runs"
LAST = "last"


def offered_runs(
    context: click.Context,
    parameter: click.Parameter,  # noqa: ARG001 - click gives it
    incomplete: str,
) -> list[str]:
    """Return the ids that begin like this, the newest first, and the word for the newest."""
    data: Path | None = context.params.get("data") or default_directory()
    try:
        names = [] if data is None else [path.name for path in (data / RUNS).iterdir()]
    except OSError:
        names = []
    found = [LAST, *sorted((name for name in names if not name.startswith(".")), reverse=True)]
    return [name for name in found if name.startswith(incomplete)][:MOST_OFFERED]


HEADER = ("run", "workflow", "state", "began", "took", "done", "cost", "")
SPARE = ("took", "", "began", "workflow", "done")
DEFAULT_LIMIT = 20
MOST_RUNS = 10_000
ROWS_SHOWN = 50

_data_option = click.option(
    "--data",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where runs are kept.  [default: the XDG data directory]",
)


@click.group(
    invoke_without_command=True,
    epilog="""\b
Examples:
  headgate runs
  headgate runs --json | jq -r 'select(.state == "interrupted") | .id'
  headgate runs show last
""",
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, MOST_RUNS),
    default=DEFAULT_LIMIT,
    show_default=True,
    help="How many to list.",
)
@_data_option
@json_option
@click.pass_context
def runs(context: click.Context, /, *, limit: int, data: Path | None, as_json: bool) -> None:
    """List the runs of workflows, or show one with its steps.

    The newest run comes first. headgate run --resume RUN continues an interrupted run.
    """
    if context.invoked_subcommand is not None:
        return
    from headgate.workflow.run_list import counted, list_runs  # noqa: PLC0415

    found = list_runs(_directory(data))
    shown = counted(_directory(data), found[:limit])
    if as_json:
        print_json_lines(map(run_json, shown))
        return
    print_tables("Runs", HEADER, map(_row, shown), empty="No runs", whole=("run",), spare=SPARE)
    if len(found) > limit:
        click.echo(f"  and {len(found) - limit:,} more; --limit shows them")


@runs.command(
    epilog="""\b
Examples:
  headgate runs show last
  headgate runs show 20270115-0800 --all
  headgate runs show last --json | jq .money
"""
)
@click.argument("name", metavar="RUN", shell_complete=offered_runs)
@click.option("--all", "is_all", is_flag=True, help="Show every run of each step.")
@_data_option
@json_option
def show(*, name: str, is_all: bool, data: Path | None, as_json: bool) -> None:
    """Show how far a run is, or how it ended.

    RUN is an id, the unique beginning of an id, or last.
    """
    from headgate.workflow.run_list import show_run  # noqa: PLC0415

    directory = _directory(data)
    found = show_run(directory, name, every_row=is_all)
    if as_json:
        print_json(run_json(_keys(found, directory)))
    else:
        _print(found, directory, is_all=is_all)


@runs.command(
    epilog="""\b
Examples:
  headgate runs output last report
  headgate runs output last case --json | jq 'select(.output.score < 0.5) | .index'
"""
)
@click.argument("name", metavar="RUN", shell_complete=offered_runs)
@click.argument("step")
@_data_option
@click.option("--json", "as_json", is_flag=True, help="Write each output as one line of JSON.")
@click.pass_context
def output(
    context: click.Context, /, *, name: str, step: str, data: Path | None, as_json: bool
) -> None:
    """Print the output of a step, one line for each item.

    Text is printed as it is, anything else as JSON.
    """
    from headgate.workflow.run_list import step_outputs  # noqa: PLC0415

    is_done = False
    for one in step_outputs(_directory(data), name, step):
        is_done = True
        _print_output(one, as_json=as_json)
    if not is_done:
        click.echo(f"headgate: no run of {printable(step)} is done", err=True)
        context.exit(EXIT_FAILED)


def _print_output(one: StepOutput, *, as_json: bool) -> None:
    import msgspec  # noqa: PLC0415

    if as_json:
        print_json_lines([one])
        return
    text = one.output if isinstance(one.output, str) else msgspec.json.encode(one.output).decode()
    # What a step wrote must not move the cursor of a person; a program gets it as it is.
    lines = text.split("\n")
    click.echo("\n".join(map(printable, lines)) if is_terminal() else text)


def _directory(data: Path | None) -> Path:
    from headgate.cli.connection import chosen_directory  # noqa: PLC0415

    directory = chosen_directory(data)
    if data is not None and not directory.exists():
        raise InvalidSettingError("--data", f"{directory} does not exist; name another one")
    return directory


def _row(run: RunSummary) -> tuple[str, ...]:
    from headgate.cli.output import from_now, length_of, moment_of  # noqa: PLC0415
    from headgate.core.money import format_usd  # noqa: PLC0415

    began = moment_of(run.created_at)
    told = run.problem or (f"on {run.server}" if run.server else "")
    return (
        run.id,
        run.workflow,
        run.state.value,
        "" if began is None or run.problem else from_now(began),
        "" if run.seconds is None or run.problem else length_of(run.seconds),
        _done(run),
        "" if run.spent_micro_usd is None else format_usd(run.spent_micro_usd),
        told,
    )


def _done(run: RunSummary) -> str:
    if not run.total:
        return ""
    return f"{'?' if run.done is None else format(run.done, ',')} of {run.total:,}"


def _keys(found: ShownRun, directory: Path) -> dict[str, object]:
    import msgspec  # noqa: PLC0415

    from headgate.workflow.run_folder import RUNS  # noqa: PLC0415

    folder = directory / RUNS / found.report.run_id
    keys = msgspec.structs.asdict(found.report)
    return {**keys, "rows": found.rows, "folder": str(folder), "source": found.record.file}


def _print(found: ShownRun, directory: Path, *, is_all: bool) -> None:
    from headgate.cli.run_progress import (  # noqa: PLC0415
        CorrectedFile,
        end_lines,
        print_rows,
        print_steps,
        resume_command,
    )
    from headgate.workflow.budgets import way_on  # noqa: PLC0415
    from headgate.workflow.run_folder import RUNS  # noqa: PLC0415

    report = found.report
    rows = list(found.rows)
    print_steps(report)
    shown = rows if is_all else rows[:ROWS_SHOWN]
    if shown:
        print_rows("All runs of steps" if is_all else "Not done", shown, now=time.time())
    if len(rows) > len(shown):
        click.echo(f"  and {len(rows) - len(shown):,} more; --all lists them")
    resume = way_on(found.record, report, resume=resume_command(report.run_id, directory))
    folder = directory / RUNS / report.run_id
    file = found.record.file
    corrected = CorrectedFile(file, resume_command(report.run_id, directory, file=file))
    for line in end_lines(report, folder, resume=resume, corrected=corrected, has_failures=False):
        click.echo(printable(line))
