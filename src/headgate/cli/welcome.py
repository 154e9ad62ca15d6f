"""What `headgate up` prints when it takes tasks: lines to paste, or one line for a program."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import msgspec

from headgate.cli.places.connection import TOKEN_FILE, read_private_file
from headgate.cli.places.token_file import token_header, token_lines
from headgate.wiring import Service, entrance_rules

EXAMPLE_TASK = '{"agentId": "demo", "action": "hello", "params": {"name": "world"}}'


class Started(msgspec.Struct, kw_only=True, rename="camel"):
    """A service that takes tasks; `token_file` is where a token for it is, if there is one."""

    address: str
    role: str
    token_file: str | None


async def welcome(service: Service, address: str, directory: Path, *, as_json: bool) -> str:
    """Return what is to be printed; the first token of a store is made for it."""
    if as_json:
        return await _for_programs(service, address, directory)
    is_needed = entrance_rules(service.settings).needs_token
    header = token_header(directory) if is_needed else ""
    lines = [f"headgate serves {address}"]
    # Before the lines that need it, and in the same piece: whoever reads one has read the other.
    token = await token_lines(service.tokens, directory, is_needed=is_needed)
    lines += [f"  {line}" for line in token]
    lines.append(f"  curl -s{header} {address}/tasks -d '{EXAMPLE_TASK}'")
    lines.append(f"  curl -s{header} {address}/tasks")
    return "\n".join(lines)


async def demo_welcome(service: Service, address: str, folder: Path) -> str:
    """Return what is printed of a demonstration: where to look at it, before anything else."""
    is_needed = entrance_rules(service.settings).needs_token
    await token_lines(service.tokens, folder, is_needed=is_needed)
    token = read_private_file(folder / TOKEN_FILE) if is_needed else None
    if service.settings.dashboard.mode == "off":
        place, use = f"headgate serves {address} without pages", "its token is"
    else:
        place, use = f"open {address} in a browser", "log in with"
    lines = [
        f"{place}; Ctrl-C ends it",
        *([] if token is None else [f"  {use} {token.decode('ascii').strip()}"]),
        "  a demonstration: agents and provider are simulated on this machine, and nothing is kept",
        # With the folder, so that the token of another service of this user is not sent.
        f"  in another terminal: headgate top --url {address} --data {shlex.quote(str(folder))}",
    ]
    return "\n".join(lines)


async def _for_programs(service: Service, address: str, directory: Path) -> str:
    """Return one line of JSON; a token that was made now is in its file alone."""
    is_needed = entrance_rules(service.settings).needs_token
    await token_lines(service.tokens, directory, is_needed=is_needed)
    # Now there is one. What is said of it has no secret, only what is wrong with the file.
    for line in await token_lines(service.tokens, directory, is_needed=is_needed):
        click.echo(f"headgate: {line}", err=True)
    path = directory / TOKEN_FILE
    started = Started(
        address=address,
        role=service.engine.health().role,
        token_file=str(path) if path.exists() else None,
    )
    return msgspec.json.encode(started).decode()
