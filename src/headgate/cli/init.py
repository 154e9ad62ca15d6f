"""`headgate init`: a small settings file to start from."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import msgspec

from headgate.cli.output import print_json
from headgate.config.sources import FILE_NAME
from headgate.errors import InvalidSettingError


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """The file that was written, and what to do next, as commands and changes of the file."""

    file: str
    next: list[str]


@click.command(
    epilog="""\b
Examples:
  headgate init
  headgate init --gateway
  headgate init --slots --postgres --config /etc/headgate/headgate.toml
"""
)
@click.option(
    "--config",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default=FILE_NAME,
    show_default=True,
    help="The file to write.",
)
@click.option("--gateway", is_flag=True, help="Add the gateway: upstreams and model names.")
@click.option("--slots", is_flag=True, help="Add key slots: provider keys with quota windows.")
@click.option("--postgres", is_flag=True, help="Add a store in PostgreSQL, for several nodes.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def init(
    *, path: Path, gateway: bool, slots: bool, postgres: bool, force: bool, as_json: bool
) -> None:
    """Write a small settings file with comments; headgate up starts with it as it is.

    The command asks nothing. Settings that need a server or an environment variable are commented
    out.
    """
    from headgate.config.example import starting_file  # noqa: PLC0415

    _write(path, starting_file(gateway=gateway, slots=slots, postgres=postgres), replaces=force)
    steps = []
    if slots:
        steps.append("remove the # of [[slots]] and set the variable that key_env names")
    if postgres:
        steps.append("run pip install 'headgate[postgres]' and set url in [store]")
    option = "" if path == Path(FILE_NAME) else f" --config {shlex.quote(str(path))}"
    steps.append(f"headgate up{option}")
    if as_json:
        print_json(Written(file=str(path), next=steps))
        return
    click.echo(f"{path}: written")
    for step in steps:
        click.echo(f"  next: {step}")


def _write(path: Path, text: str, *, replaces: bool) -> None:
    try:
        with path.open("w" if replaces else "x") as file:
            file.write(text)
    except FileExistsError:
        problem = f"{path} exists; give --force to replace it, or name another file"
        raise InvalidSettingError("--config", problem) from None
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}; name another file"
        raise InvalidSettingError("--config", problem) from None
