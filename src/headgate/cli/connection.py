"""How commands reach a service: its address, a token, and the errors that come of it.

The token is that of `--token`, of HEADGATE_TOKEN, or of the file `token` in the data directory.
Rule: the file is the key to the service that runs on its directory. It is sent to no other one
unless `--data` names it, and it is not used when others can read it. A service on this machine that
needs no token is asked without one where the token in the file is unknown to it, or not to be used.

Rule: a directory that `--data` names is asked for its own service, or none: a misspelt one must not
change what another service has.
"""

from __future__ import annotations

import functools
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from headgate.errors import (
    InvalidSettingError,
    NotAllowedError,
    ServiceError,
    ServiceUnavailableError,
)
from headgate.storage.tokens import TokenStore, first_token, read_token

if TYPE_CHECKING:
    from headgate.cli.command_client import CommandClient
    from headgate.client.requests import Address
    from headgate.config import Settings


# Where Headgate keeps what it keeps for one user: the data directory of the XDG convention.

_OWNER_FOLDER = 0o700


def data_directory() -> Path:
    """Return the directory, made if it was missing; nobody else may look into it.

    The convention has a path that is not absolute ignored.
    """
    try:
        directory = _directory()
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=_OWNER_FOLDER, exist_ok=True)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = (
            f"the directory cannot be made: {reason}; name one, set XDG_DATA_HOME or give --url"
        )
        raise InvalidSettingError("--data", problem) from None
    return directory


def chosen_directory(data: Path | None) -> Path:
    """Return the whole path of a data directory; a file at its place or above it is refused."""
    directory = (data or data_directory()).absolute()
    with suppress(OSError):
        there = next(one for one in (directory, *directory.parents) if one.exists())
        if not there.is_dir():
            raise InvalidSettingError("--data", f"{there} is not a directory; name another one")
    return directory


def default_directory() -> Path | None:
    """Return where the directory is or would be; None where a user has no home."""
    try:
        return _directory()
    except RuntimeError:
        return None


def _directory() -> Path:
    given = Path(os.environ.get("XDG_DATA_HOME", ""))
    base = given if given.is_absolute() else Path.home() / ".local" / "share"
    return base / "headgate"


TOKEN_FILE = "token"  # noqa: S105 - the name of a file
MAX_TOKEN_BYTES = 1_000
NO_ADDRESS = "no_address"

_NO_TOKEN = "give --token, set HEADGATE_TOKEN, or name the service's directory with --data"  # noqa: S105
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
        help="The service's address.  [default: HEADGATE_URL, or http://127.0.0.1:7420]",
    ),
    click.option(
        "--token",
        metavar="TOKEN",
        help="Your token.  [default: HEADGATE_TOKEN, or the file in the data directory]",
    ),
    click.option(
        "--data",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="The service's data directory, which has its address and token.",
    ),
)

json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


@contextmanager
def connect(
    connection: Connection, *, retries: int = 3, timeout_seconds: float = 30.0
) -> Iterator[CommandClient]:
    """Give a client of the service that the options name."""
    # A list of commands loads none of this.
    from headgate.cli.command_client import CommandClient  # noqa: PLC0415

    service = find_service(connection)
    client = CommandClient(service, retries=retries, timeout_seconds=timeout_seconds)
    try:
        with client:
            yield client
    except NotAllowedError as error:
        error.args = (_login_line(error, service),)
        raise


class FoundService(NamedTuple):
    """The address of a service, the token for it, and where that was read.

    `problem` says why the file that nobody named is not used, if there is one.
    """

    address: Address
    token: str | None = None
    origin: str = ""
    is_from_file: bool = False
    problem: str = ""

    @property
    def url(self) -> str:
        """The address as people write it."""
        return self.address.url

    @property
    def may_do_without(self) -> bool:
        """Whether a command may go on without a token that the service does not know."""
        return self.is_from_file and self.address.is_loopback


def find_service(connection: Connection) -> FoundService:
    """Return the service that the options name, and the token for it; nothing is sent."""
    from headgate.client.requests import TOKEN_VARIABLE, address_of, token_of  # noqa: PLC0415

    address = address_of(
        connection.url
        or (_running_here() if connection.data is None else _named_address(connection.data))
    )
    token = token_of(connection.token)
    if token is not None:
        return FoundService(address, token, "--token" if connection.token else TOKEN_VARIABLE)
    path = _token_path(connection.data, address)
    try:
        token = None if path is None else _token_in(path)
    except InvalidSettingError as error:
        if connection.data is not None:
            raise
        return FoundService(address, problem=error.problem)
    if token is None:
        return FoundService(address)
    return FoundService(address, token, str(path), is_from_file=True)


def _token_in(path: Path) -> str | None:
    """Return the token in a file; None if there is none."""
    from headgate.client.requests import token_of  # noqa: PLC0415

    content = read_private_file(path)
    try:
        return None if content is None else token_of(content.decode("ascii", "replace"))
    except InvalidSettingError as error:
        problem = f"{path} has no token: it {error.problem}"
        raise InvalidSettingError("token", problem) from None


def accepted_service(connection: Connection) -> tuple[str, str | None]:
    """Return the address of a service and the token that it takes, for what talks to it for long.

    A token that may be left out is tried once, so that it is left out from the beginning.
    """
    service = find_service(connection)
    if not service.may_do_without and not service.problem:
        return service.url, service.token
    with connect(connection, retries=0) as client:
        try:
            client.request("GET", "/projects", response_type=bytes)
        except ServiceError as error:
            # Whatever else is wrong, whoever talks to the service will say it.
            if service.problem and isinstance(error, NotAllowedError):
                raise
        return service.url, None if client.is_without_token else service.token


def _login_line(error: NotAllowedError, service: FoundService) -> str:
    """Say which token was refused, where it came from, and what to do."""
    if error.code != "unauthorized":
        return str(error)
    if service.problem:
        return f"Login failed: {error}. The token file is not used: {service.problem}."
    if not service.token:
        return f"Login failed: {error}; {_NO_TOKEN}"
    advice = "Name the service's directory with --data, or give --token."
    return f"Login failed: {error} (read from {service.origin}). {advice}"


def _named_address(data: Path) -> str:
    """Return the address of the service of a directory that somebody named; no other will do."""
    address = _address_in(data)
    if address is not None:
        return address
    try:
        # Whoever may not look into a directory may still see that there is one.
        os.stat(f"{data}/.")  # noqa: PTH116 - a Path leaves the dot out
        problem = "has no address of a service"
    except FileNotFoundError:
        problem = "does not exist"
    except NotADirectoryError:
        problem = f"{data} is not a directory; name the service's"
        raise InvalidSettingError("--data", problem) from None
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    start = f"headgate up --data {shlex.quote(str(data))}"
    line = f"{data} {problem}; start the service with {start}, or give --url"
    raise ServiceUnavailableError(line, code=NO_ADDRESS)


def _address_in(data: Path, *, is_running: bool = False) -> str | None:
    """Return the address of the service whose data directory this is, as far as it is known."""
    from headgate.storage.data_lock import service_address  # noqa: PLC0415

    address = service_address(data, is_running=is_running)
    return to_ask(address) if address and not address.endswith(":0") else None


def to_ask(address: str) -> str:
    """Return where a service is asked: one on all addresses is on the loopback one as well."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _running_here() -> str | None:
    """Return the address of the service that runs on the usual data directory, if one does.

    It may have another port than the usual one. Whoever names a service means that one.
    """
    from headgate.client.requests import URL_VARIABLE  # noqa: PLC0415

    directory = default_directory()
    if os.environ.get(URL_VARIABLE) or directory is None:
        return None
    return _address_in(directory, is_running=True)


def _token_path(data: Path | None, address: Address) -> Path | None:
    """Return the file with the token for a service; None where none is to be sent there."""
    if data is not None:
        return data / TOKEN_FILE
    directory = default_directory()
    if directory is None or not _is_service_of(directory, address):
        return None
    return directory / TOKEN_FILE


def _is_service_of(directory: Path, address: Address) -> bool:
    """Tell whether a service runs on a directory; another may have the address of one that did."""
    from headgate.client.requests import address_of  # noqa: PLC0415

    running = _address_in(directory, is_running=True)
    if running is None:
        return False
    own = address_of(running)
    is_same_host = own.host == address.host or (own.is_loopback and address.is_loopback)
    return is_same_host and own.port == address.port


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


# The token of this machine: a file in the data directory that only its owner can read.
#
# The first start on a store makes a token with all permissions, prints it once and writes it
# here, where commands on the same machine find it. Where FIRST_TOKEN has one, as from a secret of
# the platform, that one is stored instead, and not printed. Rule: nobody else can read the file at
# any moment, and a start never makes a second token: one that can be had by starting again would be
# no secret.
#
# A start may be killed between any two steps. So the token is written beside its place, then
# stored, then moved to its place. The file never has a token that the store does not know, and one
# that was stored is found beside its place by the next start, which goes on from there.

FIRST_TOKEN = "HEADGATE_FIRST_TOKEN"  # noqa: S105 - the name of a variable
PREVIOUS = f"{TOKEN_FILE}.previous"
PENDING = f"{TOKEN_FILE}.first"
_ONLY_THE_OWNER = 0o600
_ONLY_THE_OWNER_ENTERS = 0o700
_MAKE_ONE = "headgate token create makes one; without any, headgate token create --offline does"


def given_first_token(environ: Mapping[str, str]) -> str | None:
    """Return the first token that the environment has for a new store."""
    given = environ.get(FIRST_TOKEN, "").strip()
    if given and read_token(given) is None:
        form = "hg_, 12 hexadecimal digits, _ and 48 more, in lower case"
        raise InvalidSettingError(FIRST_TOKEN, f"is no token: it must be {form}")
    return given or None


async def make_first_token(
    tokens: TokenStore, directory: Path, given: str | None = None, *, is_needed: bool = True
) -> list[str]:
    """Make the first token of a store, and return the lines that tell it; none if there was one."""
    begun = _begun_text(directory / PENDING)
    if begun is None and await tokens.list():
        return []
    new = first_token(tokens.now(), text=begun or given)
    problem = _write_beside(directory, new.text) if begun is None else None
    path = directory / TOKEN_FILE
    if not await tokens.create_first(new.kept):
        # Another was first. Where an earlier start stored this one all the same, and more were made
        # since, it is lost unless it gets to its place.
        is_stored = await tokens.get(new.kept.token.id) is not None
        if not is_stored or await _problem_with(path, tokens) is None:
            _unlink_pending(directory)
            return []
    problem = problem or _move_to_place(directory)
    place = f"it is in {path}" if problem is None else f"{path} could not be written: {problem}"
    if new.text == given:
        return [f"the first token is that of {FIRST_TOKEN}; {place}"]
    lines = [f"token {new.text}", f"this is shown once; {place}"]
    return lines if is_needed else [*lines, "on this machine no token is needed"]


async def file_lines(
    tokens: TokenStore, directory: Path, *, is_needed: bool, is_shared: bool = False
) -> list[str]:
    """Look whether the file has a good token, and say what is wrong with it.

    The first token of a store that nodes share is in the directory of the first node alone.
    """
    path = directory / TOKEN_FILE
    why = await _problem_with(path, tokens)
    if why is None or (why == "" and not is_needed):
        return []
    if why == "" and is_shared:
        return ["use the token of the first node: HEADGATE_TOKEN=…, or --token"]
    return [f"{path} {why or 'does not exist'}; {_MAKE_ONE}"]


def _begun_text(pending: Path) -> str | None:
    """Return the token that an earlier start wrote and did not move to its place."""
    try:
        content = read_private_file(pending)
    except InvalidSettingError:
        return None
    text = "" if content is None else content.decode("ascii", "replace").strip()
    return None if read_token(text) is None else text


def _unlink_pending(directory: Path) -> None:
    with suppress(OSError):
        (directory / PENDING).unlink()


def token_header(directory: Path) -> str:
    """Return what a line with curl says to send the token of this machine."""
    return f' -H "Authorization: Bearer $(cat {shlex.quote(str(directory / TOKEN_FILE))})"'


def write_token(directory: Path, text: str) -> str | None:
    """Write the file in one step, and return what went wrong, if anything did.

    One that was there, of another store perhaps, is kept beside it. At no moment is there none, and
    what was written outlives a power cut.
    """
    return _write_beside(directory, text) or _move_to_place(directory)


def _write_beside(directory: Path, text: str) -> str | None:
    fresh = directory / f"{TOKEN_FILE}.{os.getpid()}"
    try:
        directory.mkdir(mode=_ONLY_THE_OWNER_ENTERS, parents=True, exist_ok=True)
        _write_private(fresh, text)
        fresh.replace(directory / PENDING)
        _sync(directory)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _move_to_place(directory: Path) -> str | None:
    path = directory / TOKEN_FILE
    try:
        _keep_previous(path, directory / PREVIOUS)
        (directory / PENDING).replace(path)
        _sync(directory)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _keep_previous(path: Path, previous: Path) -> None:
    link = previous.with_name(f"{previous.name}.{os.getpid()}")
    link.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        os.link(path, link)
        link.replace(previous)
    # To rename one name of a file to another of the same file changes nothing.
    link.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _ONLY_THE_OWNER)
    try:
        os.write(descriptor, f"{text}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def _problem_with(path: Path, tokens: TokenStore) -> str | None:
    """Return what is wrong with a file; nothing if it is not there, None if its token is good."""
    try:
        content = read_private_file(path)
    except InvalidSettingError as error:
        return f"is not used: {error.problem}"
    if content is None:
        return ""
    read = read_token(content.decode("ascii", "replace").strip())
    kept = None if read is None else await tokens.get(read[0])
    if read is None or kept is None or not kept.is_opened_by(read[1]):
        return "has no token of this store"
    return None if kept.token.is_good(tokens.now()) else "has a token that is over"


# Which SQLite file a command is about, by the same settings as the service goes by.

STORE_SIDES = ("", "-wal", "-shm", "-journal")
"""What SQLite writes beside the file of a store, in any of its ways to work."""

config_option = click.option(
    "--config",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The settings file.  [default: headgate.toml here]",
)
data_option = click.option(
    "--data",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The data directory of the service.  [default: the XDG data directory]",
)
store_option = click.option(
    "--store", "store_url", metavar="URL", help="The store, as for headgate up."
)


def settings_of(path: Path | None, store_url: str | None) -> Settings:
    """Return the settings that the service would start with."""
    from headgate.config import load_settings, settings_file  # noqa: PLC0415

    given = {} if store_url is None else {"store.url": store_url}
    return load_settings(settings_file(path), os.environ, given)


def sqlite_store(settings: Settings, data: Path | None, *, does: str) -> Path:
    """Return the file of the store; another kind of store is refused with what to do instead."""
    from headgate.app import is_shared, sqlite_file  # noqa: PLC0415

    if is_shared(settings):
        problem = f"the tasks are in PostgreSQL, which headgate does not {does}; use {_TOOLS[does]}"
        raise InvalidSettingError("store.url", problem)
    if settings.store.url == "memory:":
        raise InvalidSettingError("store.url", f"a store in memory has nothing to {does}")
    return sqlite_file(settings, chosen_directory(data))


def own_files(store: Path, data: Path | None) -> list[Path]:
    """List what a service lives from: the store with its side files, locks and tokens."""
    from headgate.storage.data_lock import ADDRESS_NAME, LOCK_NAME  # noqa: PLC0415

    folders = {store.parent, (data or data_directory()).absolute()}
    names = (LOCK_NAME, ADDRESS_NAME, TOKEN_FILE, PREVIOUS)
    sides = [store.with_name(f"{store.name}{side}") for side in STORE_SIDES]
    return sides + [folder / name for folder in sorted(folders) for name in names]


def is_same_file(path: Path, other: Path) -> bool:
    """Tell whether two names are of one file, or would be if there were one."""
    try:
        return path.samefile(other)
    except OSError:
        return path.resolve() == other.resolve()


_TOOLS = {"back up": "pg_dump", "restore": "pg_restore"}
