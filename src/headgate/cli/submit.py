"""`headgate submit`: one task from options, or many from lines of JSON."""

from __future__ import annotations

import math
from codecs import BOM_UTF8
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
import msgspec

from headgate.cli.connection import Connection, connection_options
from headgate.cli.output import duration, moment
from headgate.errors import InvalidFieldError

if TYPE_CHECKING:
    from headgate.client.requests import TaskFields

STANDARD_INPUT = "-"


@click.command(
    epilog="""\b
Examples:
  headgate submit draft --agent writer --param about=gates --wait
  headgate submit click --agent tab-1 --param x:=10 --deadline 30s --priority -5
  headgate submit --project evals --input @prompt.json --estimate-usd 0.25
  cat tasks.jsonl | headgate submit - --agent evals --patient --json > results.jsonl

\b
Exit codes: 0 accepted, or done with --wait; 1 the task failed, or a line was refused;
3 no service answers; 5 --wait-timeout is over; 130 Ctrl-C (the task goes on).
"""
)
@click.argument("action", required=False)
@click.option("--agent", "agent_id", metavar="NAME", help="The agent that runs the task.")
@click.option(
    "--project",
    "project_id",
    metavar="NAME",
    help="The project whose share and budget the task uses.",
)
@click.option(
    "--target",
    metavar="NAME",
    help="The target that runs the task.  [default: the default target]",
)
@click.option("--slot", metavar="NAME", help="The key slot whose quota the task uses.")
@click.option("--provider", metavar="NAME", help="Use the freest slot of this provider.")
@click.option(
    "--param",
    "params_given",
    metavar="KEY=TEXT",
    multiple=True,
    help="A parameter; KEY:=JSON for a value that is not a string.",
)
@click.option("--params", "params_json", metavar="JSON", help="All parameters; @FILE reads a file.")
@click.option("--input", "input_json", metavar="JSON", help="The input; @FILE reads a file.")
@click.option(
    "--priority", metavar="N", type=int, help="The priority; lower numbers run first.  [default: 0]"
)
@click.option(
    "--deadline",
    metavar="TIME",
    type=moment,
    help="The task must end before this time: 10m, or 2030-01-31T18:00:00Z.",
)
@click.option(
    "--not-before",
    metavar="TIME",
    type=moment,
    help="The earliest time at which the task may start.",
)
@click.option("--estimate-usd", metavar="USD", help="The dollars that the task will probably cost.")
@click.option(
    "--estimate-tokens", metavar="N", type=int, help="The tokens that the task will probably use."
)
@click.option(
    "--cost-usd",
    metavar="USD",
    help="The cost to book for each attempt, whatever the target reports.",
)
@click.option(
    "--weight",
    metavar="N",
    type=float,
    help="How much the task counts in its project's share if its tokens are unknown.",
)
@click.option(
    "--scope",
    "scopes",
    metavar="SCOPE",
    multiple=True,
    help="A further budget that the task is charged to.",
)
@click.option(
    "--on-exhausted",
    type=click.Choice(["wait", "reject"]),
    help="What to do when a budget is used up.",
)
@click.option(
    "--depends-on",
    metavar="TASK",
    multiple=True,
    help="A task that must end before this one starts.",
)
@click.option(
    "--on-parent-failure",
    type=click.Choice(["fail", "run"]),
    help="What to do if a task named by --depends-on fails.",
)
@click.option(
    "--label",
    "labels",
    metavar="KEY=TEXT",
    multiple=True,
    help="A label to find the task by.",
)
@click.option("--max-attempts", metavar="N", type=int, help="How many attempts may fail.")
@click.option(
    "--attempt-timeout",
    "timeout_seconds",
    metavar="TIME",
    type=duration,
    help="Stop an attempt that takes longer.",
)
@click.option(
    "--callback-url", metavar="URL", help="Where to send a webhook when the task has ended."
)
@click.option("--tab-id", metavar="TAB", help="For the target: the tab to act on.")
@click.option("--selector", metavar="TEXT", help="For the target: what to act on.")
@click.option("--ref", metavar="TEXT", help="For the target: an element.")
@click.option(
    "--idempotency-key", metavar="KEY", help="The same key submits the same task only once."
)
@click.option(
    "--wait",
    "is_waiting",
    is_flag=True,
    help="Wait until the task has ended, and print its result.",
)
@click.option("--wait-timeout", metavar="TIME", type=duration, help="Stop waiting after this time.")
@click.option("--patient", is_flag=True, help="Wait while the queue is full, instead of failing.")
@connection_options
@click.option(
    "--json", "as_json", is_flag=True, help="Write JSON, one line for each of many tasks."
)
@click.pass_context
def submit(
    context: click.Context,
    /,
    *,
    action: str | None,
    is_waiting: bool,
    wait_timeout: float | None,
    patient: bool,
    idempotency_key: str | None,
    connection: Connection,
    as_json: bool,
    **given: Any,  # noqa: ANN401 - the fields of a task, checked as they are read
) -> None:
    """Submit one task and print its id, or many tasks from lines of JSON.

    ACTION names the work to do; leave ACTION out if --input says it. With - as ACTION, each line of
    standard input is one task in the JSON of the HTTP API, and options fill in what a line does not
    say. With --wait, the command prints the result once the task has ended; progress goes to
    standard error.
    """
    # A list of commands loads none of this.

    if action == STANDARD_INPUT:
        _check_many(
            is_waiting=is_waiting, wait_timeout=wait_timeout, idempotency_key=idempotency_key
        )
        from headgate.cli.submit_lines import submit_lines  # noqa: PLC0415

        fields = task_fields(None, given)
        context.exit(submit_lines(connection, fields, patient=patient, as_json=as_json))
    from headgate.cli.submit_lines import submit_one  # noqa: PLC0415

    context.exit(
        submit_one(
            connection,
            task_fields(action, given),
            idempotency_key=idempotency_key,
            patient=patient,
            timeout_seconds=wait_timeout if is_waiting else None,
            is_waiting=is_waiting,
            as_json=as_json,
        )
    )


def _check_many(
    *, is_waiting: bool, wait_timeout: float | None, idempotency_key: str | None
) -> None:
    if is_waiting or wait_timeout is not None:
        message = "--wait is for one task; headgate watch follows many"
        raise click.UsageError(message)
    if idempotency_key is not None:
        message = "--idempotency-key is for one task"
        raise click.UsageError(message)


# From the options of `headgate submit` to the fields of a task.

FILE_MARK = "@"
JSON_MARK = ":"
MOST_FILE_BYTES = 2**20


def task_fields(action: str | None, given: dict[str, Any]) -> TaskFields:
    """Return what the options say of a task; what they do not say is left out."""
    fields = {name: value for name, value in given.items() if value not in (None, ())}
    params = _params(fields.pop("params_json", None), fields.pop("params_given", ()))
    labels = dict(_pair("--label", text) for text in fields.pop("labels", ()))
    if not math.isfinite(fields.get("weight", 1.0)):
        raise InvalidFieldError("--weight", "must be a finite number")
    document = fields.pop("input_json", None)
    if document is not None:
        fields["input"] = _json("--input", document)
    found = {"action": action, "params": params or None, "labels": labels or None}
    fields |= {name: value for name, value in found.items() if value is not None}
    return cast("TaskFields", fields)


def _params(document: str | None, pairs: tuple[str, ...]) -> dict[str, Any]:
    params = {} if document is None else _json("--params", document)
    if not isinstance(params, dict):
        raise InvalidFieldError("--params", "must be a JSON object")
    for text in pairs:
        key, value = _pair("--param", text)
        if key.endswith(JSON_MARK):
            params[key.removesuffix(JSON_MARK)] = _json(f"--param {key}=", value)
        else:
            params[key] = value
    return params


def _pair(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip(JSON_MARK):
        message = f"{option}: {text!r} is not KEY=TEXT"
        raise click.UsageError(message)
    return key, value


def _json(option: str, text: str) -> Any:  # noqa: ANN401 - any JSON
    document = _read(option, text[1:]) if text.startswith(FILE_MARK) else text.encode()
    try:
        return msgspec.json.decode(document)
    except RecursionError:
        raise InvalidFieldError(option, "is nested too deeply") from None
    except msgspec.DecodeError as error:
        advice = "" if text.startswith(FILE_MARK) else "; a string needs quotes, as '\"text\"'"
        raise InvalidFieldError(option, f"is not JSON: {error}{advice}") from None


def _read(option: str, name: str) -> bytes:
    try:
        with click.open_file(name, "rb") if name == "-" else Path(name).open("rb") as file:
            content: bytes = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidFieldError(option, f"cannot read {name}: {error.strerror}") from None
    if len(content) > MOST_FILE_BYTES:
        raise InvalidFieldError(option, f"{name} has more than {MOST_FILE_BYTES} bytes")
    return content.removeprefix(BOM_UTF8)
