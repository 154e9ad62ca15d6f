"""`headgate up`: the service in one process, from the first line to a clean end.

The first Ctrl-C (or SIGTERM) stops taking work and lets running tasks finish; the second ends the
process at once. What was running then is recovered at the next start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from headgate.cli.connection import (
    TOKEN_FILE,
    chosen_directory,
    file_lines,
    given_first_token,
    json_option,
    make_first_token,
    read_private_file,
    to_ask,
    token_header,
)
from headgate.cli.main import loop_factory, tune_interpreter
from headgate.errors import (
    DirectoryInUseError,
    HeadgateError,
    InvalidSettingError,
    StoreUnavailableError,
)
from headgate.redaction import hide_process

if TYPE_CHECKING:
    from headgate.api.app import App
    from headgate.api.http.server import RequestLog
    from headgate.app import Service
    from headgate.cli.up_demo import Demo
    from headgate.config import Settings
    from headgate.config.loading import Loaded
    from headgate.storage.data_lock import StoreLock
    from headgate.storage.writer import ChildStarter


EXIT_AT_ONCE = 130
EXIT_LOCK_LOST = 1

STOPPED_AT_ONCE = "stopped at once; the next start recovers the tasks that were running"
DEMO_STOPPED = "stopped at once"

LOCK_LOOK_SECONDS = 2.0
"""How often a service looks whether its lock is still there."""


@click.command(
    epilog="""\b
Examples:
  headgate up
  headgate up --demo
  headgate up --port 8080 --data ./data
  headgate up --config fleet.toml --store postgresql://headgate@db/headgate
  headgate up --port 0 --json | jq -r .address
"""
)
@click.option(
    "--config", "path", metavar="FILE", type=click.Path(path_type=Path), help="The settings file."
)
@click.option(
    "--data",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The data directory.  [default: the XDG data directory]",
)
@click.option("--host", metavar="ADDRESS", help="The address to serve on.  [default: 127.0.0.1]")
@click.option("--port", metavar="N", type=int, help="The port to serve on.  [default: 7420]")
@click.option("--store", "store_url", metavar="URL", help="postgresql://…, sqlite:///… or memory:")
@click.option("--ledger", "ledger_url", metavar="URL", help="A ledger outside the store: redis://…")
@click.option(
    "--dashboard",
    metavar="MODE",
    type=click.Choice(["on", "read-only", "off"]),
    help="The dashboard: on, read-only or off.  [default: on]",
)
@click.option(
    "--demo",
    "is_demo",
    is_flag=True,
    help="Run simulated agents and a fake provider; keep nothing.",
)
@json_option
def up(
    *,
    path: Path | None,
    data: Path | None,
    host: str | None,
    port: int | None,
    store_url: str | None,
    ledger_url: str | None,
    dashboard: str | None,
    is_demo: bool,
    as_json: bool,
) -> None:
    """Start the service.

    Without a settings file the service stores tasks in SQLite, and runs them on a built-in target
    that returns the task. headgate init writes a settings file.
    """
    flags = {
        "server.host": host,
        "server.port": port,
        "store.url": store_url,
        "ledger.url": ledger_url,
        "dashboard.mode": dashboard,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    own = {"--config": path, "--data": data, "--store": store_url, "--ledger": ledger_url}
    with _demonstration(own, is_wanted=is_demo) as demo:
        loaded = _loaded(path, given) if demo is None else _demo_loaded(demo, given)
        settings = loaded.settings
        directory = demo.folder if demo is not None else chosen_directory(data)
        with _held(settings, directory) as lock:
            _run(loaded, directory, lock, demo, as_json=as_json)


def _demonstration(
    own: dict[str, Path | str | None], *, is_wanted: bool
) -> AbstractContextManager[Demo | None]:
    """Return what runs beside the service; it has settings and data of its own, and takes none."""
    if not is_wanted:
        return nullcontext()
    for option, value in own.items():
        if value is not None:
            problem = "has settings and data of its own, which are thrown away; leave out"
            raise InvalidSettingError("--demo", f"{problem} {option}")
    from headgate.cli.up_demo import Demo  # noqa: PLC0415

    return Demo()


def _loaded(path: Path | None, given: dict[str, str | int]) -> Loaded:
    # A list of commands loads none of this.
    from headgate.config import settings_file  # noqa: PLC0415

    return _loaded_from(settings_file(path), os.environ, given)


def _demo_loaded(demo: Demo, given: dict[str, str | int]) -> Loaded:
    from headgate.cli.up_demo import FAILING_SLOTS  # noqa: PLC0415

    return _loaded_from(demo.settings_file, demo.environ, given, FAILING_SLOTS)


def _loaded_from(
    path: Path | None,
    environ: Mapping[str, str],
    given: dict[str, str | int],
    failing_slots: Collection[str] = (),
) -> Loaded:
    from headgate.cli.logs import configure_logs  # noqa: PLC0415
    from headgate.config.loading import Origin, load  # noqa: PLC0415
    from headgate.config.sources import variable_warnings  # noqa: PLC0415

    loaded = load(Origin(path=path, environ=environ, options=given))
    configure_logs(loaded.settings.log, failing_slots=failing_slots)
    # A text that is no token stops the start before anything is opened.
    given_first_token(environ)
    for line in variable_warnings(environ):
        click.echo(f"headgate: warning: {line}", err=True)
    return loaded


@contextmanager
def _held(settings: Settings, directory: Path) -> Iterator[StoreLock | None]:
    """Hold the store, and say in the data directory where the service is, also without a store."""
    from headgate.app import held_file  # noqa: PLC0415
    from headgate.storage.data_lock import announce, hold_store, store_folders  # noqa: PLC0415

    file = held_file(settings, directory)
    address = _address(settings.server.host, settings.server.port)
    with ExitStack() as held:
        lock = None if file is None else held.enter_context(hold_store(file, address=address))
        if file is None or directory not in store_folders(file):
            held.enter_context(announce(directory, address=address))
        yield lock


def _starter(settings: Settings, lock: StoreLock | None) -> ChildStarter | None:
    """Start the process that writes, if one shall; the rest is loaded while it starts."""
    if not settings.store.writes_in_process:
        return None
    from headgate.storage.writer import ChildStarter  # noqa: PLC0415

    kind = "sqlite" if lock is not None else "postgres"
    modules = (f"headgate.storage.{kind}",)
    inherited = () if lock is None else lock.descriptors
    starter = ChildStarter(inherited=inherited, modules=modules)
    starter.start_ahead()
    return starter


def _run(
    loaded: Loaded, directory: Path, lock: StoreLock | None, demo: Demo | None, *, as_json: bool
) -> None:
    starter = _starter(loaded.settings, lock)
    from headgate.api.http.server import raise_open_files  # noqa: PLC0415

    raise_open_files()
    hide_process()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(loaded, directory, lock, starter, demo, as_json=as_json))


async def _watch(lock: StoreLock, demo: Demo | None) -> None:
    """See to it that this process has the data to itself; if another has it by now, end at once.

    What ran here is started again by the other, as after a crash.
    """
    import structlog  # noqa: PLC0415

    log = structlog.get_logger("headgate.data")
    problem = ""
    while True:
        await asyncio.sleep(LOCK_LOOK_SECONDS)
        try:
            if lock.restore():
                log.warning("the lock on the data directory was deleted; it is there again")
            problem = ""
        except DirectoryInUseError as error:
            click.echo(
                f"headgate: {error}; this service stops, because its lock was deleted", err=True
            )
            sys.stderr.flush()
            _exit(EXIT_LOCK_LOST, demo)
        except StoreUnavailableError as error:
            if problem != str(error):
                problem = str(error)
                log.warning("the lock on the data directory cannot be restored", problem=problem)


async def _serve(
    loaded: Loaded,
    directory: Path,
    lock: StoreLock | None,
    starter: ChildStarter | None,
    demo: Demo | None,
    *,
    as_json: bool,
) -> None:
    from headgate.api.http.server import serve  # noqa: PLC0415
    from headgate.app import build_app, build_service  # noqa: PLC0415

    stopping = asyncio.Event()
    _handle_signals(stopping, demo)
    settings = loaded.settings
    environ = os.environ if demo is None else demo.environ
    service = build_service(
        settings, data=directory, environ=environ, loaded=loaded, starter=starter
    )
    if lock is not None:
        service.engine.also_run("data lock", partial(_watch, lock, demo))
    _handle_reload(service)
    serves: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(
            _logging(service, build_app(service)),
            host=settings.server.host,
            port=settings.server.port,
            on_ready=lambda host, port: serves.set_result(_address(host, port)),
            opened=service.engine.opened,
        )
    )
    await asyncio.wait((serving, serves), return_when=asyncio.FIRST_COMPLETED)
    try:
        if serving.done():
            # Whoever has the port is another service, and no command may be sent to it.
            _tell("", directory, lock)
            serving.result()
        if settings.server.port == 0:
            _tell(serves.result(), directory, lock)
        await _work(service, serves.result(), directory, demo, stopping, as_json=as_json)
    finally:
        serving.cancel()
        await asyncio.wait((serving,))


def _tell(address: str, directory: Path, lock: StoreLock | None) -> None:
    """Write down where the service is, or that it is nowhere, for commands that look for it."""
    from headgate.storage.data_lock import tell_address  # noqa: PLC0415

    tell_address(directory, address)
    if lock is not None:
        lock.tell(address)


def _logging(service: Service, app: App) -> App | RequestLog:
    """Have tasks and requests logged, if their lines are wanted; otherwise they cost nothing."""
    from headgate.api.http.server import RequestLog  # noqa: PLC0415
    from headgate.cli.logs import is_told, task_logger  # noqa: PLC0415
    from headgate.engine.task_log import TaskLog  # noqa: PLC0415

    if is_told(logging.INFO):
        service.engine.feed.subscribe(events=TaskLog(task_logger()))
    return RequestLog(app) if is_told(logging.DEBUG) else app


async def _work(
    service: Service,
    address: str,
    directory: Path,
    demo: Demo | None,
    stopping: asyncio.Event,
    *,
    as_json: bool,
) -> None:

    engine = service.engine
    engine.node.address = service.settings.server.advertise or address
    environ = os.environ if demo is None else demo.environ
    first = attach_first_token(service, directory, given_first_token(environ))
    try:
        await engine.start()
        tune_interpreter()
        if demo is None or as_json:
            lines = await welcome(service, address, directory, first, environ, as_json=as_json)
            click.echo(lines)
        else:
            click.echo(demo_welcome(service, address, directory))
        if demo is not None:
            _begin(demo, address)
        await stopping.wait()
        if demo is None:
            click.echo(f"headgate: stopping{_running_line(service)}", err=True)
    finally:
        drain_seconds = service.config.settings.scheduler.drain_seconds
        gateway = service.gateway
        # Calls write to the store when they end, so it is closed after them.
        await engine.drain(
            drain_seconds=drain_seconds, beside=None if gateway is None else gateway.drain
        )
        if gateway is not None:
            await gateway.close()
        await engine.close()
        if service.telemetry is not None:
            await asyncio.to_thread(service.telemetry.close)
        if engine.runner.has_left_behind:
            _leave_behind(demo)
        if demo is None and stopping.is_set():
            click.echo("headgate: stopped", err=True)


def _running_line(service: Service) -> str:
    """Say what a stop waits for, and how to wait no longer."""
    tasks = len(service.engine.runner)
    calls = 0 if service.gateway is None else service.gateway.in_hand
    counts = [(count, noun) for count, noun in ((tasks, "task"), (calls, "call")) if count]
    if not counts:
        return ""
    shown = " and ".join(f"{count:,} {noun}{'s' if count > 1 else ''}" for count, noun in counts)
    has = "has" if tasks + calls == 1 else "have"
    return f" when {shown} {has} finished; Ctrl-C again stops at once"


def attach_first_token(service: Service, directory: Path, given: str | None = None) -> list[str]:
    """Have the first token stored before the service is ready; the lines of it are added then."""
    lines: list[str] = []

    async def prepare() -> None:
        from headgate.app import auth_rules  # noqa: PLC0415

        is_needed = auth_rules(service.settings).needs_token
        made = make_first_token(service.api.tokens, directory, given, is_needed=is_needed)
        lines.extend(await made)

    service.engine.before_start(prepare)
    return lines


def _begin(demo: Demo, address: str) -> None:
    """Let the agents of a demonstration begin."""
    from headgate.cli.connection import TOKEN_FILE, read_private_file  # noqa: PLC0415

    token = read_private_file(demo.folder / TOKEN_FILE)
    demo.begin(address, None if token is None else token.decode("ascii").strip())


def _leave_behind(demo: Demo | None) -> None:
    # The event loop would wait for it at its end, however long it takes. Its tasks are queued
    # again, or are taken back at the next start.
    click.echo("headgate: some work did not stop in time, and ends with this process", err=True)
    sys.stdout.flush()
    _exit(0, demo)


def _exit(code: int, demo: Demo | None) -> None:
    """End the process at once; of commands and a demonstration nothing may be left even so."""
    from headgate.executors.confinement import end_commands  # noqa: PLC0415

    end_commands()
    if demo is not None:
        demo.remove_folder()
    os._exit(code)


def _address(host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def _handle_signals(stopping: asyncio.Event, demo: Demo | None) -> None:
    def stop() -> None:
        if stopping.is_set():
            # A terminal that has gone must not keep the process.
            with suppress(OSError):
                click.echo(
                    f"headgate: {STOPPED_AT_ONCE if demo is None else DEMO_STOPPED}", err=True
                )
                sys.stderr.flush()
            _exit(EXIT_AT_ONCE, demo)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


def _handle_reload(service: Service) -> None:
    """Read the settings again at SIGHUP; what comes of it is in the log."""
    under_way: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = asyncio.get_running_loop().create_task(_reload(service))
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


async def _reload(service: Service) -> None:
    import structlog  # noqa: PLC0415

    from headgate.storage.audit import SIGNAL  # noqa: PLC0415

    log = structlog.get_logger("headgate.config")
    try:
        found = await service.config.reload(SIGNAL)
        waiting = [change.key for change in found.needs_restart]
        log.info("settings reloaded", changed=len(found.changed), needs_restart=waiting)
    except HeadgateError as error:
        log.warning("settings were not reloaded; nothing has changed", problem=str(error))
    except Exception:
        # Nobody awaits this, so a fault that nobody foresaw would go unseen.
        log.exception("settings were not reloaded")


# What `headgate up` prints when it takes tasks: lines to paste, or one line for a program.

EXAMPLE_TASK = '{"agentId": "demo", "action": "hello", "params": {"name": "world"}}'


class Started(msgspec.Struct, kw_only=True, rename="camel"):
    """A service that takes tasks; `token_file` is where a token for it is, if there is one."""

    address: str
    role: str
    token_file: str | None


async def welcome(
    service: Service,
    address: str,
    directory: Path,
    first: list[str],
    environ: Mapping[str, str],
    *,
    as_json: bool,
) -> str:
    """Return what is to be printed, with the lines of the first token if one was made."""
    from headgate.app import auth_rules, is_shared  # noqa: PLC0415
    from headgate.config import budget_warnings  # noqa: PLC0415

    settings = service.settings
    is_needed = auth_rules(settings).needs_token
    keys = _missing_keys(settings, environ)
    budgets = [f"warning: {one.line}" for one in service.config.replaced_at_start]
    budgets += [f"warning: {line}" for line in budget_warnings(service.config.settings)]
    problems = await file_lines(
        service.api.tokens, directory, is_needed=is_needed, is_shared=is_shared(settings)
    )
    if as_json:
        # What is said of the token has no secret, only what is wrong with the file.
        for line in (*problems, *keys, *budgets):
            click.echo(f"headgate: {line}", err=True)
        return _for_programs(service, address, directory)
    header = token_header(directory) if is_needed else ""
    lines = [f"headgate serves {address}"]
    # Before the lines that need it, and in the same piece: whoever reads one has read the other.
    lines += [f"  {line}" for line in first or problems]
    place = settings.server.advertise or to_ask(address)
    # Without the token in its file they would be refused.
    if not (is_needed and problems):
        lines.append(f"  curl -s{header} {place}/tasks -d '{EXAMPLE_TASK}'")
        lines.append(f"  curl -s{header} {place}/tasks")
    if settings.gateway.enabled:
        # The one of OpenAI's clients has the version in it, the one of Anthropic's has not.
        lines.append(f"  OPENAI_BASE_URL={place}/v1 or ANTHROPIC_BASE_URL={place} for agents")
    lines += [f"  {line}" for line in (*keys, *budgets)]
    return "\n".join(lines)


def _missing_keys(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Return a line for each slot and upstream without its key; a client may send its own."""
    from headgate.cli.config_report import has_no_upstream_key, missing_keys  # noqa: PLC0415

    lines = [f"warning: {line}" for line in missing_keys(settings, environ)]
    if not lines and has_no_upstream_key(settings, environ):
        return ["no upstream has a key; each client sends its own"]
    return lines


def demo_welcome(service: Service, address: str, folder: Path) -> str:
    """Return what is printed of a demonstration: where to look at it, before anything else."""
    from headgate.app import auth_rules  # noqa: PLC0415

    address = to_ask(address)
    is_needed = auth_rules(service.settings).needs_token
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


def _for_programs(service: Service, address: str, directory: Path) -> str:
    """Return one line of JSON; a token that was made now is in its file alone."""
    path = directory / TOKEN_FILE
    started = Started(
        address=address,
        role=service.engine.health().role,
        token_file=str(path) if path.exists() else None,
    )
    return msgspec.json.encode(started).decode()
