"""`headgate config`: check the settings, show where each comes from, print an example."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from headgate.cli.output import print_json, print_table
from headgate.core.text import printable

NAMES_SHOWN = 6
COUNTED = ("projects", "agents", "targets", "budgets", "prices", "rate_limits", "slots")

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

    Environment variables such as HEADGATE_SCHEDULER__MAX_INFLIGHT go over the file.
    """


@config.command(
    epilog="""\b
Examples:
  headgate config check
  headgate config check --config staging.toml
"""
)
@_config_option
@_json_option
def check(*, path: Path | None, as_json: bool) -> None:
    """Say whether the service could start with these settings, or which key is wrong."""
    from headgate.cli.config_report import check_settings  # noqa: PLC0415  not for a list of commands

    report = check_settings(path)
    if as_json:
        print_json(report)
        return
    for warning in report.warnings:
        click.echo(f"headgate: warning: {printable(warning)}", err=True)
    found = {kind: getattr(report, kind) for kind in COUNTED}
    rows = [
        (kind.replace("_", " "), str(len(names)), _some(names)) for kind, names in found.items()
    ]
    print_table(
        f"{report.file or 'no headgate.toml here, all defaults'}: ok",
        ("settings", "number", "names"),
        rows,
    )


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
    """Print every setting in effect and where it comes from; secrets are hidden."""
    from headgate.cli.config_report import settings_in_effect  # noqa: PLC0415

    shown = settings_in_effect(path)
    if as_json:
        print_json(shown)
        return
    rows = [(key, _as_text(one.value), one.origin) for key, one in shown.items()]
    print_table("Settings in effect", ("key", "value", "from"), rows)


@config.command(
    epilog="""\b
Examples:
  headgate config example > headgate.toml
"""
)
@click.option("--json", "as_json", is_flag=True, help="Write the same as JSON, without comments.")
def example(*, as_json: bool) -> None:
    """Print a settings file with every key of the service explained."""
    from headgate.cli.config_report import EXAMPLE  # noqa: PLC0415

    if as_json:
        import tomllib  # noqa: PLC0415

        print_json(tomllib.loads(EXAMPLE.read_text()))
    else:
        click.echo(EXAMPLE.read_text(), nl=False)


def _some(names: list[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
