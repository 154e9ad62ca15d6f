"""`headgate config`: check the settings, show where each comes from, print an example."""

from __future__ import annotations

import os
import select
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from headgate.cli.main import EXIT_BAD_INPUT
from headgate.cli.output import print_json, print_table
from headgate.core.text import printable

if TYPE_CHECKING:
    from headgate.cli.config_report import CheckReport

NAMES_SHOWN = 6
PIPE_SECONDS = 5.0
DASH = Path("-")
COUNTED = (
    "projects",
    "agents",
    "targets",
    "budgets",
    "prices",
    "rate_limits",
    "slots",
    "upstreams",
    "models",
)

_path_or_dash = click.Path(path_type=Path, allow_dash=True)
_config_option = click.option(
    "--config",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The file to read.  [default: headgate.toml here, if there is one]",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


@click.group()
def config() -> None:
    """Check the settings, show where each comes from, print an example.

    Environment variables such as HEADGATE_SCHEDULER__MAX_INFLIGHT override the file.
    """


@config.command(
    epilog="""\b
Examples:
  headgate config check
  headgate config check staging.toml
  headgate config example | headgate config check
"""
)
@click.argument("file", metavar="[FILE]", required=False, type=_path_or_dash)
@_config_option
@click.option(
    "--file-only",
    "is_file_only",
    is_flag=True,
    help="Do not check whether the needed variables and packages are here.",
)
@_json_option
@click.pass_context
def check(
    context: click.Context,
    /,
    *,
    file: Path | None,
    path: Path | None,
    is_file_only: bool,
    as_json: bool,
) -> None:
    """Say whether the service would start here with these settings, or what is wrong.

    Without FILE, the command reads headgate.toml in this directory; - is standard input. It
    contacts no server; headgate doctor also checks servers, targets and the port.
    """
    from headgate.cli.config_report import check_settings  # noqa: PLC0415  not for a list of commands

    if file is not None and path is not None:
        message = "name the file once: as FILE or with --config"
        raise click.UsageError(message)
    text = _piped() if file is None and path is None else _read() if file == DASH else None
    named = path if file in (None, DASH) else file
    report = check_settings(named, text, is_file_only=is_file_only)
    if as_json:
        print_json(report)
    else:
        _print(report)
    context.exit(0 if report.ok else EXIT_BAD_INPUT)


def _print(report: CheckReport) -> None:
    for problem in report.problems:
        click.echo(f"headgate: {printable(problem)}", err=True)
    for warning in report.warnings:
        click.echo(f"headgate: warning: {printable(warning)}", err=True)
    found = {kind: getattr(report, kind) for kind in COUNTED}
    rows = [
        (kind.replace("_", " "), str(len(names)), _some(names)) for kind, names in found.items()
    ]
    verdict = "ok" if report.ok else "headgate up would not start here"
    print_table(
        f"{report.file or 'no headgate.toml here, all defaults'}: {verdict}",
        ("settings", "number", "names"),
        rows,
    )


def _piped() -> str | None:
    """Return what is piped or redirected into this command; None if nothing is.

    A program that starts this one may leave an idle pipe, so it is waited for briefly.
    """
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except (AttributeError, OSError, ValueError):
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None
    if not select.select([descriptor], [], [], PIPE_SECONDS)[0]:
        return None
    return _read() or None


def _read() -> str:
    from headgate.cli.config_report import STANDARD_INPUT  # noqa: PLC0415
    from headgate.config.sources import MAX_FILE_BYTES, decoded_text  # noqa: PLC0415

    return decoded_text(sys.stdin.buffer.read(MAX_FILE_BYTES + 1), STANDARD_INPUT)


@config.command(
    epilog="""\b
Examples:
  headgate config show
  headgate config show --json | jq '."scheduler.max_inflight"'
"""
)
@_config_option
@_json_option
def show(*, path: Path | None, as_json: bool) -> None:
    """Print every setting in effect and where it comes from; secrets are hidden.

    Overrides, such as those of headgate budget, are shown if the service with this file answers.
    """
    from headgate.cli.config_report import settings_in_effect, with_overrides  # noqa: PLC0415

    shown, url = with_overrides(settings_in_effect(path), path)
    if as_json:
        print_json(shown)
        return
    rows = [(key, _as_text(one.value), one.origin) for key, one in shown.items()]
    title = f"Settings in effect at {url}" if url else "Settings of the file and the environment"
    print_table(title, ("key", "value", "from"), rows)


@config.command(
    epilog="""\b
Examples:
  headgate config example > headgate.toml
  headgate config example | headgate config check
"""
)
@click.option("--json", "as_json", is_flag=True, help="Write the same as JSON, without comments.")
def example(*, as_json: bool) -> None:
    """Print a settings file with every key of the service explained."""
    from headgate.config.example import example as example_text  # noqa: PLC0415

    if as_json:
        import tomllib  # noqa: PLC0415

        print_json(tomllib.loads(example_text()))
    else:
        click.echo(example_text(), nl=False)


@config.command(
    epilog="""\b
Examples:
  headgate config explain queue_share
  headgate config explain slots
  headgate config explain --json | jq 'select(.default == "required")'
"""
)
@click.argument("word", metavar="[WORD]", required=False, default="")
@_json_option
def explain(*, word: str, as_json: bool) -> None:
    """Explain settings: meaning, allowed values and default.

    WORD is a section, a key, or a part of one; without it all settings are explained.
    """
    from headgate.cli.config_report import explained_settings  # noqa: PLC0415

    found = explained_settings(word)
    if as_json:
        for one in found:
            click.echo(msgspec.json.encode(one))
        return
    for section in dict.fromkeys(one.section for one in found):
        click.echo(section)
        for one in found:
            if one.section == section:
                click.echo(f"  {one.key}: {one.value}; default: {one.default}")
                click.echo(f"    {one.meaning}")


def _some(names: list[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
