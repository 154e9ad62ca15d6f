"""`headgate doctor`: everything that the service needs, checked from outside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from headgate.cli.connection import config_option, data_option, json_option, store_option
from headgate.cli.main import EXIT_FAILED
from headgate.cli.output import print_json, print_table

if TYPE_CHECKING:
    from headgate.cli.doctor_checks import Finding


@click.command(
    epilog="""\b
Examples:
  headgate doctor
  headgate doctor --config fleet.toml --data /var/lib/headgate
  headgate doctor --json | jq '.checks[] | select(.verdict != "ok")'
"""
)
@config_option
@data_option
@store_option
@json_option
@click.pass_context
def doctor(
    context: click.Context,
    *,
    path: Path | None,
    data: Path | None,
    store_url: str | None,
    as_json: bool,
) -> None:
    """Check settings, store, ledger, disk, clock, keys, token and port.

    It changes nothing and sends nothing to targets. It asks each upstream with a key for its list
    of models. The exit code is 1 if something would stop the service from working.
    """
    from headgate.cli.doctor_checks import examine  # noqa: PLC0415

    findings = examine(path, data, store_url)
    has_failed = any(one.verdict == "fail" for one in findings)
    if as_json:
        print_json({"ok": not has_failed, "checks": findings})
    else:
        header = ("check", "verdict", "found", "what to do")
        print_table("Doctor", header, [_row(one) for one in findings])
    context.exit(EXIT_FAILED if has_failed else 0)


def _row(finding: Finding) -> tuple[str, str, str, str]:
    return finding.check, finding.verdict, finding.found, finding.advice
