"""How commands reach a service: its address, a token, and the errors that come of it.

The token is that of `--token`, of HEADGATE_TOKEN, or of the file `token` in the data directory.
Rule: the file is the key to the service of this machine. It is sent to no other one unless `--data`
names it, and it is not used when others can read it.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from headgate.cli.places.data_directory import default_directory
from headgate.errors import InvalidSettingError, NotAllowedError

if TYPE_CHECKING:
    from headgate.client.address import Address
    from headgate.client.sync_client import SyncClient

TOKEN_FILE = "token"  # noqa: S105 - the name of a file
MAX_TOKEN_BYTES = 1_000

_NO_TOKEN = "no token was found: give --token, set HEADGATE_TOKEN, or name the service's --data"  # noqa: S105
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

Command = TypeVar("Command", bound=Callable[..., Any])


class Connection(NamedTuple):
    """What the options say about the service; what they do not say is found elsewhere."""

    url: str | None = None
    token: str | None = None
    data: Path | None = None


def connection_options(command: Command) -> Command:
    """Add --url, --token and --data to a command, which gets them as `connection`."""

    @functools.wraps(command)
    def collected(
        *args: object, url: str | None, token: str | None, data: Path | None, **rest: object
    ) -> object:
        return command(*args, connection=Connection(url, token, data), **rest)

    for option in reversed(_OPTIONS):
        option(collected)
    return collected  # type: ignore[return-value]


_OPTIONS = (
    click.option(
        "--url",
        metavar="URL",
        help="Where the service is.  [default: HEADGATE_URL, or http://127.0.0.1:7420]",
    ),
    click.option(
        "--token",
        metavar="TOKEN",
        help="Who asks.  [default: HEADGATE_TOKEN, or the file in the data directory]",
    ),
    click.option(
        "--data",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="The service's data directory, where its token and its address are found.",
    ),
)

json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


@contextmanager
def connect(
    connection: Connection, *, retries: int = 3, timeout_seconds: float = 30.0
) -> Iterator[SyncClient]:
    """Give a client of the service that the options name."""
    # A list of commands loads none of this.
    from headgate.client.sync_client import SyncClient  # noqa: PLC0415

    url, token = found_service(connection)
    client = SyncClient(url, token=token, retries=retries, timeout_seconds=timeout_seconds)
    try:
        with client:
            yield client
    except NotAllowedError as error:
        if not token:
            error.args = (f"{error}; {_NO_TOKEN}",)
        raise


def found_service(connection: Connection) -> tuple[str, str | None]:
    """Return the address of the service that the options name, and the token for it."""
    from headgate.client.address import address_of, token_of  # noqa: PLC0415

    address = address_of(connection.url or _address_in(connection.data))
    return address.url, token_of(connection.token) or _token_in_file(connection.data, address)


def _address_in(data: Path | None) -> str | None:
    """Return the address of the service whose data directory this is, as far as it is known."""
    from headgate.data_lock import holder_of  # noqa: PLC0415

    if data is None:
        return None
    address = holder_of(data).address
    if not address or address.endswith(":0"):
        return None
    # A service on all addresses is on the loopback one, which is what it takes for its own.
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _token_in_file(data: Path | None, address: Address) -> str | None:
    from headgate.client.address import token_of  # noqa: PLC0415

    if data is None and not address.is_loopback:
        return None
    directory = data or default_directory()
    if directory is None:
        return None
    content = read_private_file(directory / TOKEN_FILE)
    return None if content is None else token_of(content.decode("ascii", "replace"))


def read_private_file(path: Path) -> bytes | None:
    """Return a file that only its owner can read; None if there is none."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & _OTHERS:
                problem = f"others may read {path}; make a new token, and run chmod 600 {path}"
                raise InvalidSettingError("token", problem)
            return file.read(MAX_TOKEN_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror}"
        raise InvalidSettingError("token", problem) from None
