"""Tasks as work of a Ray cluster: Headgate decides when and inside which budget, Ray decides where.

What happens in the cluster is in `ray_cluster`. This side keeps the driver, a child process for
each target, and asks it in lines of JSON. Rule: the work of an attempt has an owner in the cluster
and is found by the attempt's id. So a driver that ends is started anew and asked again, and a
service that comes back goes on with what was begun.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import math
import pickle
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar, Literal

import msgspec
import structlog

from headgate.core.lifecycle import Cancelled, Failed, Limited, Lost, Outcome, Succeeded
from headgate.core.retries import Backoff
from headgate.core.task import AttemptReport, ProgressReport
from headgate.errors import InvalidSettingError
from headgate.executors.executor import Room, WorkOrder, shortened, too_large
from headgate.executors.targets import CallableTarget, CommandTarget, RayTarget
from headgate.executors.templates import Environment
from headgate.extras import naming_extras
from headgate.providers.prices import PriceList

log = structlog.get_logger("headgate.ray")


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as it is sent to the cluster, and what it needs there."""

    order: WorkOrder
    target: CommandTarget | CallableTarget
    name: str
    prices: PriceList
    environ: Mapping[str, str] = {}


# Outcomes as JSON.

_KINDS: dict[str, type[Outcome]] = {
    kind.__name__: kind for kind in (Succeeded, Failed, Limited, Cancelled, Lost)
}


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """An outcome with its kind; its result is apart, because no decoder reads it in its place."""

    kind: str
    value: msgspec.Raw
    result: str | None = None


def tell(outcome: Outcome) -> bytes:
    """Write an outcome."""
    kind, result = type(outcome).__name__, None
    if isinstance(outcome, Succeeded) and outcome.result is not None:
        result = bytes(outcome.result).decode()
        outcome = msgspec.structs.replace(outcome, result=None)
    value = msgspec.Raw(msgspec.json.encode(outcome))
    return msgspec.json.encode(Told(kind=kind, value=value, result=result))


def read(told: str | bytes) -> Outcome:
    """Read an outcome."""
    found = msgspec.json.decode(told, type=Told)
    outcome = msgspec.json.decode(found.value, type=_KINDS[found.kind])
    if isinstance(outcome, Succeeded) and found.result is not None:
        return msgspec.structs.replace(outcome, result=msgspec.Raw(found.result.encode()))
    return outcome


Asked = Literal["start", "outcome", "cancel", "room"]
Away = Literal["", "unasked", "unanswered"]
"""Whether the holder is away, and if so, whether the question may have reached it before."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A line from the service."""

    id: int
    ask: Asked
    attempt: str = ""
    target: str = ""
    work: str = ""
    options: dict[str, Any] = {}
    is_forced: bool = False
    is_resumed: bool = False
    since: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line to the service; `id` 0 says whether the driver has reached the cluster."""

    id: int
    problem: str = ""
    away: Away = ""
    outcome: str | None = None
    nodes: list[dict[str, dict[str, float]]] | None = None
    pending: list[tuple[dict[str, float], int]] = []
    cluster: str = ""
    reports: dict[str, ProgressReport] = {}
    seen: int = 0


class UnreachableError(Exception):
    """Nobody in the cluster answered; `was_asked` says that the question may have arrived."""

    def __init__(self, problem: str, *, was_asked: bool = False) -> None:
        super().__init__(problem)
        self.was_asked = was_asked


# The driver as the service sees it.

START_SECONDS = 60.0
CANCEL_SECONDS = 30.0
LOST_SECONDS = 120.0
"""How long a cluster that cannot be reached is waited for before its work is taken for lost."""
MAX_ARRIVED = 10_000
MAX_GIVEN_UP = 10_000
"""How many lost attempts of a target are ended at most once the cluster answers again."""
RETRY_SECONDS = 5.0
MAX_LINE_BYTES = 256 << 20
_BACKOFF = Backoff(base_seconds=0.2, max_seconds=5.0)
_MAX_NOISE = 20


class RayDriver:
    """The child process that speaks with one cluster; it is started when something is asked.

    All targets of a service on one cluster share it.
    """

    _shared: ClassVar[dict[tuple[int, str], RayDriver]] = {}

    def __init__(self, address: str) -> None:
        self._address = address
        self._users = 0
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._reading: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._ids = count(1)
        self._noise: deque[str] = deque(maxlen=_MAX_NOISE)

    async def ask(self, ask: Asked, **fields: Any) -> Answer:  # noqa: ANN401  those of a question
        """Ask the driver; `UnreachableError` if it ends first, or gets no answer of the cluster."""
        process = await self._started()
        question = Question(id=next(self._ids), ask=ask, **fields)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[question.id] = answer
        assert process.stdin is not None  # noqa: S101  it is a pipe
        try:
            process.stdin.write(msgspec.json.encode(question) + b"\n")
            with suppress(ConnectionError):
                await process.stdin.drain()
            found = await answer
        finally:
            self._waiting.pop(question.id, None)
        if found.away:
            raise UnreachableError(found.problem, was_asked=found.away == "unanswered")
        return found

    @classmethod
    def of(cls, address: str) -> RayDriver:
        """Return the driver of a cluster, for one more who closes it again."""
        key = id(asyncio.get_running_loop()), address
        driver = cls._shared.setdefault(key, cls(address))
        driver._users += 1
        return driver

    async def close(self) -> None:
        """End the driver with its last user; what the cluster does goes on."""
        self._users -= 1
        if self._users:
            return
        self._shared.pop((id(asyncio.get_running_loop()), self._address), None)
        process, self._process = self._process, None
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
            self._starting = None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
        if self._reading:
            await asyncio.wait(self._reading)

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        starting = self._starting
        try:
            return await asyncio.shield(starting)
        finally:
            if starting.done() and self._starting is starting:
                self._starting = None

    async def _start(self) -> asyncio.subprocess.Process:
        code = "from headgate.executors.ray_cluster import main; main()"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            code,
            self._address,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                self._read_later(self._read_noise(process))
                assert process.stdout is not None  # noqa: S101  it is a pipe
                line = await process.stdout.readline()
        except (TimeoutError, asyncio.CancelledError) as error:
            process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                problem = f"it did not answer within {START_SECONDS:g} s"
                raise UnreachableError(problem) from None
            raise
        answer = msgspec.json.decode(line, type=Answer) if line else None
        if answer is None or answer.problem:
            await process.wait()
            noise = "".join(list(self._noise)[-1:])
            raise UnreachableError(noise if answer is None else answer.problem)
        self._process = process
        self._read_later(self._read(process))
        return process

    def _read_later(self, reading: Any) -> None:  # noqa: ANN401  a coroutine
        task = asyncio.get_running_loop().create_task(reading)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101  it is a pipe
        while line := await process.stdout.readline():
            answer = msgspec.json.decode(line, type=Answer)
            waiting = self._waiting.get(answer.id)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        code = await process.wait()
        if self._process is process:
            self._process = None
            log.warning("the driver of Ray ended", address=self._address, exit_code=code)
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(UnreachableError("the driver ended", was_asked=True))

    async def _read_noise(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None  # noqa: S101  it is a pipe
        while piece := await process.stderr.read(65_536):
            self._noise.extend(piece.decode(errors="replace").strip().splitlines()[-_MAX_NOISE:])


RESOURCE_OPTIONS = ("num_cpus", "num_gpus", "memory")


class RayExecutor:
    """Has the work of one target done by a Ray cluster."""

    def __init__(
        self,
        name: str,
        target: RayTarget,
        *,
        environ: Mapping[str, str],
        prices: PriceList,
    ) -> None:
        self._name = name
        self._inner = _inner_target(name, target)
        environment = Environment(environ, has_slot=False)
        variables = {
            key: environment.filled(value, setting=f"targets.{name}.env.{key}")
            for key, value in target.env.items()
        }
        self._needs = {"num_cpus": 1.0, **target.resources}
        own = {key: value for key, value in self._needs.items() if key not in RESOURCE_OPTIONS}
        self._options: dict[str, Any] = {
            **{key: value for key, value in self._needs.items() if key in RESOURCE_OPTIONS},
            "resources": own,
            "runtime_env": _with_variables(target.runtime_env, variables),
        }
        self._grace_seconds = target.kill_grace_seconds
        self._max_bytes = target.max_result_bytes
        self._prices = prices
        self._driver: RayDriver | None = None
        self._address = target.address
        self._left: set[str] = set()
        self._seen = 0
        self._problem = ""
        self._given_up: deque[str] = deque(maxlen=MAX_GIVEN_UP)
        self._ending: asyncio.Task[None] | None = None
        self._arrived: deque[str] = deque(maxlen=MAX_ARRIVED)

    async def open(self) -> None:
        """Refuse to begin without the package; a cluster may be away."""
        with naming_extras(f"targets.{self._name}.kind"):
            if importlib.util.find_spec("ray") is None:
                raise ModuleNotFoundError(name="ray")
        self._driver = RayDriver.of(self._address)

    async def close(self) -> None:
        """Let go of the driver; what the cluster still does goes on."""
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.wait([self._ending])
        driver, self._driver = self._driver, None
        if driver is not None:
            await driver.close()

    async def _ask(self, ask: Asked, **fields: Any) -> Answer:  # noqa: ANN401  those of a question
        if self._driver is None:
            raise UnreachableError("this service is about to end")
        return await self._driver.ask(ask, **fields)

    def leave(self, task_id: str) -> None:
        """Let the work of a task go on when its coroutine is cancelled: another finds it."""
        self._left.add(task_id)

    async def execute(self, order: WorkOrder) -> Outcome:
        """Have the work done, or wait for the end of what another process had begun."""
        attempt = f"{order.task_id}.{order.attempt}"
        try:
            return await self._executed(order, attempt)
        except asyncio.CancelledError:
            if order.task_id not in self._left:
                await self._cancel(attempt, is_resumed=order.is_resumed)
            raise
        finally:
            self._left.discard(order.task_id)

    async def room(self) -> Room:
        """Say how many more tasks the nodes of the cluster have room for.

        A cluster that cannot say it has none: without a bound it would be flooded.
        """
        arrived = tuple(self._arrived)
        self._arrived.clear()
        try:
            answer = await self._ask("room", target=self._name, since=self._seen)
        except UnreachableError as error:
            return Room(free=0, why=self._unreachable(error))
        if answer.problem != self._problem:
            self._problem = answer.problem
            if self._problem:
                log.error(
                    "the free capacity of a Ray cluster is unknown",
                    target=self._name,
                    problem=self._problem,
                )
        if answer.problem or answer.nodes is None:
            return Room(
                free=0,
                why=f"the free capacity of Ray at {self._address} is unknown: {self._problem}",
            )
        room = room_in(answer.nodes, self._needs, pending=answer.pending)
        self._seen = answer.seen
        reports = [_of_attempt(name, report) for name, report in answer.reports.items()]
        return msgspec.structs.replace(
            room,
            pool=answer.cluster,
            needs=self._needs,
            arrived=arrived,
            reports=tuple(reports),
        )

    async def _executed(self, order: WorkOrder, attempt: str) -> Outcome:
        if not order.is_resumed:
            try:
                problem = await self._start(order, attempt)
            except UnreachableError as error:
                if not error.was_asked:
                    line = self._unreachable(error)
                    return Lost(has_started=False, retry_seconds=RETRY_SECONDS, error=line)
                # It may have begun. The holder knows; to start it again could do it twice.
                problem = ""
            if problem:
                return Failed(error=f"Ray did not take it: {problem}")
            self._arrived.append(order.task_id)
        return await self._outcome(attempt, is_resumed=order.is_resumed)

    async def _start(self, order: WorkOrder, attempt: str) -> str:
        work = Work(order=order, target=self._inner, name=self._name, prices=self._prices)
        answer = await self._ask(
            "start",
            attempt=attempt,
            target=self._name,
            work=base64.b64encode(pickle.dumps(work)).decode(),
            options=self._options,
        )
        return answer.problem

    async def _outcome(self, attempt: str, *, is_resumed: bool) -> Outcome:
        loop = asyncio.get_running_loop()
        silent_since: float | None = None
        for number in count(1):
            try:
                answer = await self._ask("outcome", attempt=attempt, is_resumed=is_resumed)
            except UnreachableError as error:
                silent_since = silent_since or loop.time()
                if loop.time() - silent_since > LOST_SECONDS:
                    self._end_later(attempt)
                    return Lost(has_started=True, error=self._unreachable(error))
                await asyncio.sleep(_BACKOFF.seconds(min(number, 10), draw=0.5))
                continue
            if answer.problem:
                return Lost(has_started=True, error=shortened(f"Ray lost it: {answer.problem}"))
            if answer.outcome is None:
                return Lost(has_started=True, error="the Ray cluster does not know it any more")
            return self._bounded(read(answer.outcome))
        raise AssertionError

    def _bounded(self, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, Succeeded) or outcome.result is None:
            return outcome
        if len(bytes(outcome.result)) <= self._max_bytes:
            return outcome
        return Failed(error=too_large(self._max_bytes), usage=outcome.usage)

    async def _cancel(self, attempt: str, *, is_resumed: bool) -> None:
        """Ask the work to stop, and end it if it does not; return when it has."""
        for is_forced, seconds in ((False, self._grace_seconds), (True, CANCEL_SECONDS)):
            with suppress(UnreachableError, TimeoutError):
                async with asyncio.timeout(seconds + 1.0):
                    named: dict[str, Any] = {"attempt": attempt, "is_resumed": is_resumed}
                    await self._ask("cancel", is_forced=is_forced, **named)
                    await self._ask("outcome", **named)
                    return

    def _end_later(self, attempt: str) -> None:
        """End an attempt that was given up once the cluster answers: it is run again."""
        self._given_up.append(attempt)
        if self._ending is None or self._ending.done():
            self._ending = asyncio.get_running_loop().create_task(self._end_given_up())

    async def _end_given_up(self) -> None:
        while self._given_up:
            attempt = self._given_up[0]
            try:
                await self._ask("cancel", attempt=attempt, is_forced=True, is_resumed=True)
            except UnreachableError:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                # Others may have taken its place, which are newer.
                with suppress(ValueError):
                    self._given_up.remove(attempt)

    def _unreachable(self, error: UnreachableError) -> str:
        return f"Ray at {self._address} cannot be reached: {shortened(str(error))}"


def _of_attempt(name: str, report: ProgressReport) -> AttemptReport:
    task_id, _, attempt = name.rpartition(".")
    return AttemptReport(task_id=task_id, attempt=int(attempt), report=report)


_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}
"""What Ray calls resources where it says what nodes have."""


def room_in(
    nodes: list[dict[str, dict[str, float]]],
    needs: Mapping[str, float],
    *,
    pending: Sequence[tuple[Mapping[str, float], int]] = (),
) -> Room:
    """Count what fits into the nodes of a cluster beside what waits there to be placed.

    `pending` has what one of each kind needs and how many there are, whatever their target.
    """
    wanted = {_NAMES.get(key, key): (key, need) for key, need in needs.items() if need > 0}
    if not wanted:
        return Room(free=1_000 if nodes else 0, why="" if nodes else "the Ray cluster has no node")
    left = [dict(node["free"]) for node in nodes]
    for others, number in pending:
        _place(left, {_NAMES.get(key, key): need for key, need in others.items()}, number)
    own = {name: need for name, (_, need) in wanted.items()}
    free = sum(_fitting(node, own) for node in left)
    return Room(free=free) if free > 0 else Room(free=0, why=_short_of(nodes, wanted))


def _place(free: list[dict[str, float]], needs: Mapping[str, float], number: int) -> None:
    """Take from nodes what a number of tasks need, as far as they fit."""
    for node in free:
        fitting = min(number, _fitting(node, needs))
        for name, need in needs.items():
            node[name] = node.get(name, 0.0) - need * fitting
        number -= fitting


def _fitting(free: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Count the tasks that fit into what is free on a node; those that need nothing always do."""
    counts = (
        math.floor(free.get(name, 0.0) / need + 1e-9) for name, need in needs.items() if need > 0
    )
    return max(0, min(counts, default=0))


def _short_of(
    nodes: list[dict[str, dict[str, float]]], wanted: Mapping[str, tuple[str, float]]
) -> str:
    for name, (key, need) in wanted.items():
        most = max((node["total"].get(name, 0.0) for node in nodes), default=0.0)
        if most < need:
            return f"no node of the Ray cluster has {key} {need:g}; the largest has {most:g}"
    parts = []
    for name, (key, need) in wanted.items():
        free = max((node["free"].get(name, 0.0) for node in nodes), default=0.0)
        total = sum(node["total"].get(name, 0.0) for node in nodes)
        if free < need:
            parts.append(f"a task needs {key} {need:g}; {free:g} of {total:g} is free on one node")
    if parts:
        return "the Ray cluster is full: " + "; ".join(parts)
    return "the Ray cluster is full: work that it has not placed yet takes what is free"


def _inner_target(name: str, target: RayTarget) -> CommandTarget | CallableTarget:
    if (target.entry_point is None) == (target.command is None):
        problem = "give either entry_point or command: what the cluster is to run"
        setting = f"targets.{name}"
        raise InvalidSettingError(setting, problem)
    if target.command is not None:
        return CommandTarget(
            command=target.command,
            pass_env=tuple(target.env),
            max_output_bytes=target.max_result_bytes,
            max_result_bytes=target.max_result_bytes,
            kill_grace_seconds=target.kill_grace_seconds,
        )
    assert target.entry_point is not None  # noqa: S101  checked above
    return CallableTarget(entry_point=target.entry_point, max_result_bytes=target.max_result_bytes)


def _with_variables(runtime_env: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    if not variables:
        return runtime_env
    return {**runtime_env, "env_vars": {**runtime_env.get("env_vars", {}), **variables}}
