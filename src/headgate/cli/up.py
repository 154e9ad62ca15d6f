"""`headgate up`: the service in one process, from the first line to a clean end.

The first Ctrl-C (or SIGTERM) stops taking work and lets running tasks finish; the second ends the
process at once. What was running then is recovered at the next start.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headgate.cli.data_directory import data_directory
from headgate.errors import InvalidSettingError

if TYPE_CHECKING:
    from headgate.settings import Settings
    from headgate.wiring import Service

EXIT_AT_ONCE = 130

# What a bare install does not bring, and the extra that brings each.
EXTRAS = {"apsw": "server", "httptools": "server", "structlog": "server", "psycopg": "postgres"}

EXAMPLE_TASK = '{"agentId": "demo", "action": "hello", "params": {"name": "world"}}'


@click.command(
    epilog="""\b
Examples:
  headgate up
  headgate up --port 8080 --data ./data
  headgate up --config fleet.toml --store postgresql://headgate@db/headgate
"""
)
@click.option(
    "--config", "path", metavar="FILE", type=click.Path(path_type=Path), help="The settings."
)
@click.option(
    "--data",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where the SQLite file lies.  [default: the XDG data directory]",
)
@click.option("--host", metavar="ADDRESS", help="The address to serve on.  [default: 127.0.0.1]")
@click.option("--port", metavar="N", type=int, help="The port to serve on.  [default: 7420]")
@click.option("--store", "store_url", metavar="URL", help="postgresql://…, sqlite:///… or memory:")
@click.option("--ledger", "ledger_url", metavar="URL", help="Books outside the store: redis://…")
def up(
    *,
    path: Path | None,
    data: Path | None,
    host: str | None,
    port: int | None,
    store_url: str | None,
    ledger_url: str | None,
) -> None:
    """Start the service: API and dispatcher in one process.

    Without a configuration it keeps tasks in SQLite, and runs them on a built-in target that
    answers with what it was given.
    """
    flags = {
        "server.host": host,
        "server.port": port,
        "store.url": store_url,
        "ledger.url": ledger_url,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    with _naming_extras():
        settings = _settings(path, given)
        directory = (data or data_directory()).absolute()
        with _held(settings, directory):
            _run(settings, directory)


@contextmanager
def _naming_extras() -> Iterator[None]:
    """Say which extra is to be installed, where a package of one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        problem = f"needs the package {package}, which is not installed"
        advice = f"run pip install 'headgate[{EXTRAS[package]}]'"
        raise InvalidSettingError("headgate up", f"{problem}; {advice}") from None


def _settings(path: Path | None, given: dict[str, str | int]) -> Settings:
    # A list of commands loads none of this.
    from headgate.cli.logs import configure_logs  # noqa: PLC0415
    from headgate.settings import load_settings, settings_file  # noqa: PLC0415

    settings = load_settings(settings_file(path), os.environ, given)
    configure_logs()
    return settings


def _held(settings: Settings, directory: Path) -> AbstractContextManager[None]:
    from headgate.data_lock import hold_directory  # noqa: PLC0415
    from headgate.wiring import held_folder  # noqa: PLC0415

    folder = held_folder(settings, directory)
    if folder is None:
        return nullcontext()
    return hold_directory(folder, address=_address(settings.server.host, settings.server.port))


def _run(settings: Settings, directory: Path) -> None:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(settings, directory))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415
    except ModuleNotFoundError:
        return None
    factory: Any = uvloop.new_event_loop
    return factory  # type: ignore[no-any-return]


async def _serve(settings: Settings, directory: Path) -> None:
    from headgate.web.server import serve  # noqa: PLC0415
    from headgate.wiring import build_app, build_service  # noqa: PLC0415

    stopping = asyncio.Event()
    _handle_signals(stopping)
    service = build_service(settings, data=directory, environ=os.environ)
    serves: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(
            build_app(service),
            host=settings.server.host,
            port=settings.server.port,
            on_ready=lambda host, port: serves.set_result(_address(host, port)),
        )
    )
    await asyncio.wait((serving, serves), return_when=asyncio.FIRST_COMPLETED)
    try:
        if serving.done():
            serving.result()
        await _work(service, serves.result(), stopping)
    finally:
        serving.cancel()
        await asyncio.wait((serving,))


async def _work(service: Service, address: str, stopping: asyncio.Event) -> None:
    engine = service.engine
    engine.node.address = service.settings.server.advertise or address
    try:
        await engine.start()
        _tune_interpreter()
        click.echo(_welcome(address))
        await stopping.wait()
        click.echo("headgate: finishing what runs; Ctrl-C again ends at once", err=True)
    finally:
        await engine.stop(drain_seconds=service.settings.scheduler.drain_seconds)
        if engine.runner.has_left_behind:
            _leave_behind()


def _leave_behind() -> None:
    # The event loop would wait for it at its end, however long it takes. Its tasks are queued
    # again, or are taken back at the next start.
    click.echo("headgate: work that would not stop ends with the process", err=True)
    sys.stdout.flush()
    os._exit(0)


def _address(host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def _handle_signals(stopping: asyncio.Event) -> None:
    def stop() -> None:
        if stopping.is_set():
            sys.stderr.flush()
            os._exit(EXIT_AT_ONCE)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


def _tune_interpreter() -> None:
    # The writer's thread asks for its turn after every statement. With the default it waits five
    # milliseconds for it whenever the event loop is busy.
    sys.setswitchinterval(0.001)
    # A backlog of many small objects makes full collections long, and none of it is garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _welcome(address: str) -> str:
    return (
        f"headgate serves {address}\n"
        f"  curl -s {address}/tasks -d '{EXAMPLE_TASK}'\n"
        f"  curl -s {address}/tasks"
    )
