"""`headgate run --dry-run`: in which order steps would run, their cost, and where a run ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from headgate.cli.main import EXIT_EXHAUSTED, EXIT_FAILED
from headgate.cli.output import print_json, print_table, run_json
from headgate.cli.run_progress import limited_or_used, money_text
from headgate.cli.run_session import found_address, own_output, read_source
from headgate.config import settings_file
from headgate.core.budgets.ledger import Account, Unit
from headgate.core.budgets.scopes import ROOT_NAME
from headgate.core.money import format_usd
from headgate.core.text import printable
from headgate.errors import LedgerUnavailableError
from headgate.workflow.backend import Money
from headgate.workflow.budgets import choose_ledger, run_scopes
from headgate.workflow.costs import check_prices, limits_dollars, with_settings_prices
from headgate.workflow.dry_run import (
    DryPart,
    DryRun,
    DryStop,
    budgets_before,
    check_here,
    rehearse,
    service_budgets,
)
from headgate.workflow.expansion import load_items
from headgate.workflow.parser import read_workflow
from headgate.workflow.run_record import RunOptions, RunScope
from headgate.workflow.workflow import Workflow

PARTS_SHOWN = 50
ANSWER_SECONDS = 30.0
HEADER = ("step", "runs", "", "each", "together", "cumulated", "why")


def print_dry_run(file: Path, options: RunOptions, *, as_json: bool) -> int:
    """Write what a run of a file would do, and return the exit code that it would end with."""
    workflow = read_workflow(file, read_source(file))
    workflow = with_settings_prices(workflow, settings_file(options.config))
    scopes = run_scopes(workflow, options, os.environ)
    hold = None
    if options.server is None:
        check_prices(workflow, scopes)
        # A module may print while it is imported; standard output is for what comes below.
        with own_output(lambda line: click.echo(line, err=True)):
            checked = asyncio.run(check_here(workflow, options, os.environ))
        hold = checked.hold
        for missing in checked.missing_keys:
            click.echo(f"headgate: warning: {printable(str(missing))}", err=True)
    found = rehearse(
        workflow,
        load_items(workflow, copies=None),
        asyncio.run(_budgets(workflow, options)),
        concurrency=options.concurrency or workflow.concurrency,
        now=time.time(),
        is_limited=limits_dollars(scopes) and options.server is None,
        hold=hold,
    )
    if as_json:
        print_json(run_json(as_keys(found)))
    else:
        print_order(found)
        for line in dry_lines(found):
            click.echo(printable(line))
    if found.counts["fails"]:
        return EXIT_FAILED
    return 0 if found.stop is None else EXIT_EXHAUSTED


def as_keys(found: DryRun) -> dict[str, object]:
    """Give the keys of a dry run; budgets as a status of them has them."""
    return {**msgspec.structs.asdict(found), "accounts": _budgets_of(found)}


def print_order(found: DryRun) -> None:
    """Write the table of what would run, as far as it is not too long."""
    at_once = f"{found.concurrency:,} at once"
    title = f"Dry run of {found.workflow}: {_counted(found.total, 'run')} of steps, {at_once}"
    shown = found.parts[:PARTS_SHOWN]
    print_table(title, HEADER, [_row(part) for part in shown], whole=("step",))
    more = len(found.parts) + found.parts_left_out - len(shown)
    if more:
        click.echo(f"  and {more:,} more; --json lists them")


def dry_lines(found: DryRun) -> Iterator[str]:
    """Give the lines below the table: the budgets as they stand, and what comes of it."""
    for money in limited_or_used(_budgets_of(found)):
        yield money_text(money)
    if found.stop is not None:
        yield _stop_text(found.stop, not_run=found.counts["not run"])
    least = "at least " if found.is_least else ""
    tokens = f", {found.tokens:,} tokens" if found.tokens else ""
    line = f"estimated: {least}{format_usd(found.micro_usd)}{tokens}"
    if found.stop is not None:
        line += f"; all of it would need {least}{format_usd(found.needed_micro_usd)}"
    if fails := found.counts["fails"]:
        line += f"; {_counted(fails, 'run')} of steps would fail"
    if found.unknown:
        line += f"; nobody knows what {_counted(found.unknown, 'run')} of steps will cost"
    yield f"{line}; nothing was run"


def part_name(part: DryPart) -> str:
    """Return runs of a step as people read them: `case[0…99]`."""
    if part.first is None:
        return part.step
    if part.first == part.last:
        return f"{part.step}[{part.first}]"
    return f"{part.step}[{part.first}…{part.last}]"


def _row(part: DryPart) -> tuple[str, ...]:
    if part.fate != "runs":
        return (part_name(part), f"{part.runs:,}", part.fate, "", "", "", part.why)
    why = "; ".join(one.text for one in part.holds)
    if part.is_unknown:
        may_skip = "may be skipped" if part.may_skip else ""
        cumulated = format_usd(part.cumulated_micro_usd)
        return (part_name(part), f"{part.runs:,}", may_skip, "unknown", "unknown", cumulated, why)
    least = "at least " if part.is_least else ""
    each = format_usd(part.least_micro_usd)
    if part.most_micro_usd != part.least_micro_usd:
        each = f"{each} to {format_usd(part.most_micro_usd)}"
    return (
        part_name(part),
        f"{part.runs:,}",
        "may be skipped" if part.may_skip else "",
        f"{least}{each}",
        f"{least}{format_usd(part.micro_usd)}",
        f"{'~' if part.is_least else ''}{format_usd(part.cumulated_micro_usd)}",
        why,
    )


def _stop_text(stop: DryStop, *, not_run: int) -> str:
    refused = stop.refused
    scope = refused.scope or ROOT_NAME
    after = "before anything has run" if stop.after is None else f"after {stop.after}"
    needs = _dry_amount(refused.requested, refused.unit)
    left = _dry_amount(
        refused.limit - refused.spent - refused.overrun - refused.reserved, refused.unit
    )
    lost = f"{_counted(not_run, 'run')} of steps would not run"
    return f"{scope} would stop it at {stop.at}, {after}: {needs} needed, {left} left; {lost}"


def _dry_amount(amount: int, unit: Unit) -> str:
    return format_usd(amount) if unit is Unit.MICRO_USD else f"{amount:,} tokens"


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _budgets_of(found: DryRun) -> list[Money]:
    """Return the budgets around a run; the root is one if it is limited."""
    return [_money(one) for one in found.accounts if one.scope or one.limit is not None]


def _money(account: Account) -> Money:
    balance, limit = account.balance, account.limit
    return Money(
        scope=account.scope or ROOT_NAME,
        spent_micro_usd=balance.spent_micro_usd + balance.overrun_micro_usd,
        reserved_micro_usd=balance.reserved_micro_usd,
        limit_micro_usd=None if limit is None else limit.limit_micro_usd,
    )


async def _budgets(workflow: Workflow, options: RunOptions) -> list[Account]:
    scopes = run_scopes(workflow, options, os.environ)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            if options.server is not None:
                return await _of_service(workflow, options, scopes)
            ledger = choose_ledger(scopes, options, os.environ)
            return await budgets_before(ledger, scopes, options)
    except TimeoutError:
        problem = f"the ledger did not answer within {ANSWER_SECONDS:g} seconds"
        raise LedgerUnavailableError(problem) from None


async def _of_service(
    workflow: Workflow, options: RunOptions, scopes: Sequence[RunScope]
) -> list[Account]:
    # Most runs are none of a service, and need none of this.
    from headgate.workflow.remote_tasks import check_for_service  # noqa: PLC0415

    check_for_service(workflow, workflow.file)
    url, token = found_address(options)
    return await service_budgets(url, token, scopes, options, workflow=workflow)
