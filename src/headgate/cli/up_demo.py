"""One run of the demonstration, beside the service: a folder to throw away, and a thread.

The thread has an event loop of its own for the fake provider, the place where tasks are done and
the agents, so that what they take is not taken from the service's. Rule: nothing of the user's is
read or written, and when the run has ended nothing of it is left.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.resources import files
from itertools import count
from pathlib import Path
from random import Random
from string import Template
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
import structlog

from headgate.api.http.server import serve
from headgate.client.client import Client
from headgate.client.requests import TaskFields
from headgate.errors import ServiceError, ServiceUnavailableError
from headgate.executors.http import ATTEMPT
from headgate.testing.fake_provider import LOOPBACK, FakeProvider, FakeResponse, json_response

# What the agents of the demonstration submit, and when: drawn from one seed, without an end.
#
# First come tasks that show what it looks like when something is the matter: a project that is
# paused, a budget that is used up and one that nearly is, a webhook that nobody takes. Then work
# comes in waves, a few tasks a second, of which most succeed. Rule: one seed gives one plan, and
# what it shows in the first minute it shows for as long as anybody looks.

SEED = 1
TASKS_PER_SECOND = 3.0
LEAST_GAP_SECONDS = 0.1
WAVE_SECONDS = 120.0
WAVE_HEIGHT = 0.6
DOLLARS_PER_MILLION_TOKENS = 6.0
MAX_PARENTS = 2
OPENING_SECONDS = 0.4
FIRST = -10
FAIL_SHARE = 0.05
RECOVER_SHARE = 0.04
CANCEL_SHARE = 0.02
REFUSED_SHARE = 0.01
WEBHOOK_SHARE = 0.05
OPEN_SHARE = 0.3
COMPARED_SHARE = 0.3

USED_UP = "session:load-test"
NEARLY_USED_UP = "session:spring-survey"
PAUSED = "archive"

Hook = Literal["taken", "gone"]
Course = Literal["succeeds", "fails", "recovers"]


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task to come: `parents` are numbers of earlier ones, `hook` is where its end is told."""

    number: int
    at_seconds: float
    fields: TaskFields
    parents: tuple[int, ...] = ()
    hook: Hook | None = None
    is_cancelled: bool = False


class Kind(NamedTuple):
    """One kind of work: who does it, how often it comes, how long it takes and what it uses."""

    action: str
    project: str
    agents: tuple[str, ...]
    share: int
    seconds: tuple[float, float]
    tokens: tuple[int, int]
    subjects: tuple[str, ...]
    target: str | None = None
    scope: str | None = None


_FETCH = Kind(
    action="fetch-page",
    project="crawler",
    agents=("crawler-1", "crawler-2", "crawler-3"),
    share=9,
    seconds=(0.3, 4.0),
    tokens=(200, 1_200),
    subjects=("price list", "release notes", "product page", "support forum"),
)
_SUMMARISE = Kind(
    action="summarise",
    project="research",
    agents=("researcher-1", "researcher-2", "researcher-3"),
    share=5,
    seconds=(0.4, 2.5),
    tokens=(800, 4_000),
    subjects=("three papers on caching", "an interview", "the quarterly report", "a long thread"),
)
KINDS = (
    _FETCH,
    _SUMMARISE,
    Kind(
        action="review-change",
        project="research",
        agents=("reviewer-1", "reviewer-2"),
        share=2,
        seconds=(3.0, 9.0),
        tokens=(2_000, 8_000),
        subjects=("the parser", "the login page", "the retry loop", "a migration"),
        scope="session:release/workflow:review",
    ),
    Kind(
        action="grade-answer",
        project="evals",
        agents=("grader-1", "grader-2"),
        share=4,
        seconds=(0.3, 1.2),
        tokens=(800, 4_200),
        subjects=("question 12", "question 40", "question 77", "question 103"),
    ),
    Kind(
        action="answer-ticket",
        project="support",
        agents=("helper-1", "helper-2"),
        share=4,
        seconds=(0.5, 3.0),
        tokens=(1_500, 6_500),
        subjects=("a refund", "a lost password", "an invoice", "a slow export"),
        target="model",
    ),
)
_SHARES = [kind.share for kind in KINDS]


def plan(seed: int = SEED) -> Iterator[PlannedTask]:
    """Give every task in the order of its time, which counts from the beginning."""
    drawn = Random(seed)  # noqa: S311 - nothing here is a secret
    numbers = count()
    for fields, hook in _opening():
        yield PlannedTask(number=next(numbers), at_seconds=0.0, fields=fields, hook=hook)
    fetched: deque[int] = deque(maxlen=MAX_PARENTS)
    at_seconds = 0.0
    for number in numbers:
        task = _next(drawn, number, at_seconds, tuple(fetched))
        if task.fields["action"] == _FETCH.action and not (task.is_cancelled or _is_refused(task)):
            fetched.append(number)
        yield task
        at_seconds += max(LEAST_GAP_SECONDS, drawn.expovariate(_rate(at_seconds)))


def _is_refused(task: PlannedTask) -> bool:
    return task.fields.get("on_exhausted") == "reject"


def _rate(at_seconds: float) -> float:
    """Return how many tasks come in a second: by and by more than can run, then fewer."""
    wave = math.sin(2 * math.pi * at_seconds / WAVE_SECONDS)
    return TASKS_PER_SECOND * (1 + WAVE_HEIGHT * wave)


def _opening() -> Iterator[tuple[TaskFields, Hook | None]]:
    for user in range(1, 9):
        yield _charged("load-test", f"user {user}", usd="0.01", scope=USED_UP), None
    for person in range(1, 13):
        yield _charged("survey", f"person {person}", usd="0.0155", scope=NEARLY_USED_UP), None
    yield _short("report", "to an address that is gone", project_id="research"), "gone"
    for part in range(1, 6):
        yield _short("compress", f"volume {part}", project_id=PAUSED), None


def _short(action: str, subject: str, *, project_id: str) -> TaskFields:
    """Return a task that is soon done, and goes before others, so that its effect is seen."""
    params = _params(subject, OPENING_SECONDS, 900, "succeeds")
    # Without an estimate the first of a kind is a probe, and would book a tenth of the root budget.
    return TaskFields(
        action=action,
        project_id=project_id,
        params=params,
        priority=FIRST,
        estimate_usd="0.0054",
    )


def _charged(action: str, subject: str, *, usd: str, scope: str) -> TaskFields:
    fields = _short(action, subject, project_id="evals")
    fields["scopes"], fields["estimate_usd"] = [scope], usd
    return fields


def _next(drawn: Random, number: int, at_seconds: float, fetched: tuple[int, ...]) -> PlannedTask:
    kind = drawn.choices(KINDS, _SHARES)[0]
    fields = _work(drawn, kind, number)
    has_parents = kind is _SUMMARISE and drawn.random() < COMPARED_SHARE
    return PlannedTask(
        number=number,
        at_seconds=at_seconds,
        fields=fields,
        parents=fetched if has_parents else (),
        hook="taken" if drawn.random() < WEBHOOK_SHARE else None,
        is_cancelled=drawn.random() < CANCEL_SHARE,
    )


def _work(drawn: Random, kind: Kind, number: int) -> TaskFields:
    estimate = drawn.randint(*kind.tokens)
    used = round(estimate * drawn.uniform(0.6, 1.1))
    fields = TaskFields(
        action=kind.action,
        project_id=kind.project,
        agent_id=None if drawn.random() < OPEN_SHARE else drawn.choice(kind.agents),
        target=kind.target,
        params=_params(
            drawn.choice(kind.subjects), drawn.uniform(*kind.seconds), used, _course(drawn)
        ),
        priority=drawn.choice((-1, 0, 0, 0, 1)),
        estimate_tokens=estimate,
        estimate_usd=f"{estimate * DOLLARS_PER_MILLION_TOKENS / 1e6:.6f}",
        scopes=[kind.scope] if kind.scope else [],
        labels={"team": kind.project, "run": f"run-{number // 100 % 10}"},
        max_attempts=3,
    )
    if drawn.random() < REFUSED_SHARE:
        fields["scopes"], fields["on_exhausted"] = [USED_UP], "reject"
    return fields


def _course(drawn: Random) -> Course:
    draw = drawn.random()
    if draw < FAIL_SHARE:
        return "fails"
    return "recovers" if draw < FAIL_SHARE + RECOVER_SHARE else "succeeds"


def _params(subject: str, seconds: float, tokens: int, course: Course) -> dict[str, object]:
    """Say what the program on the other side does with a task, and to what it is done."""
    return {"of": subject, "seconds": round(seconds, 2), "tokens": tokens, "course": course}


# What the service of the demonstration works with: a place where tasks are done, and a receiver.
#
# Both are one server on the loopback interface. A task says itself how long it takes and what comes
# of it. Those that bring the key of a slot use its window at the fake provider, and are turned away
# when that is used up. Rule: nothing here reaches another machine.

MAX_SECONDS = 20.0
MODEL = "demo-model"
CHAT_MODEL = "demo-chat"
OUTPUT_SHARE = 0.2
DRAIN_SECONDS = 0.2

_BEARER = "Bearer "


class WorkBody(msgspec.Struct, kw_only=True):
    """What a task says of itself; what it leaves out is short and succeeds."""

    kind: str = "work"
    of: str = "something"
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = 0.5
    tokens: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 500
    course: Literal["succeeds", "fails", "recovers"] = "succeeds"


class ChatBody(msgspec.Struct, kw_only=True):
    """A call of a model; `metadata` says how long it takes, and how many tokens it uses."""

    metadata: dict[str, str] = {}


class DemoWorld:
    """Does tasks, answers calls, takes webhooks; `provider` has the windows of keys of tasks."""

    def __init__(self, provider: FakeProvider) -> None:
        self._provider = provider

    async def serve_request(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        """Answer one request."""
        message = await receive()
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        response = await self.respond(scope["path"], headers, message.get("body", b""))
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(response.body)).encode()),
            *((name.encode(), value.encode()) for name, value in response.headers.items()),
        ]
        await send({"type": "http.response.start", "status": response.status, "headers": head})
        await send({"type": "http.response.body", "body": response.body})

    async def respond(self, path: str, headers: dict[str, str], body: bytes) -> FakeResponse:
        """Return the answer to a request, when the work that it asks for is done."""
        match path:
            case "/work":
                return await self._worked(headers, body)
            case "/v1/chat/completions":
                return await self._chatted(body)
            case "/hooks/taken":
                return FakeResponse(status=204)
            case "/hooks/gone":
                return FakeResponse(status=410)
            case _:
                return json_response({"error": f"there is nothing at {path}"}, status=404)

    async def _worked(self, headers: dict[str, str], body: bytes) -> FakeResponse:
        try:
            work = msgspec.json.decode(body, type=WorkBody)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return json_response({"error": str(error)}, status=400)
        refused = self._refused(headers.get("authorization", "").removeprefix(_BEARER))
        if refused is not None:
            return refused
        await asyncio.sleep(work.seconds)
        return _result(work, is_first=headers.get(ATTEMPT) == "1")

    async def _chatted(self, body: bytes) -> FakeResponse:
        try:
            said = msgspec.json.decode(body, type=ChatBody).metadata
            work = msgspec.convert(said, WorkBody, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return json_response({"error": {"message": str(error)}}, status=400)
        await asyncio.sleep(work.seconds)
        output = round(work.tokens * OUTPUT_SHARE)
        usage = {"prompt_tokens": work.tokens - output, "completion_tokens": output}
        choice = {"index": 0, "message": {"role": "assistant", "content": f"About {work.of}."}}
        return json_response({"model": CHAT_MODEL, "choices": [choice], "usage": usage})

    def _refused(self, key: str) -> FakeResponse | None:
        """Use the window of a key; return a refusal if nothing is left of it."""
        if not key:
            return None
        window = self._provider.window(key)
        if not window.is_used_up:
            window.use()
            return None
        left_seconds = max(1, round((window.resets_at or 0.0) - time.time()))
        error = {"error": "the quota of this key is used up"}
        return json_response(error, status=429, headers={"retry-after": str(left_seconds)})


def _result(work: WorkBody, *, is_first: bool) -> FakeResponse:
    if work.course == "fails":
        return json_response({"error": f"there was nothing to find in {work.of}"}, status=422)
    if work.course == "recovers" and is_first:
        return json_response({"error": "the model did not answer in time"}, status=500)
    output = round(work.tokens * OUTPUT_SHARE)
    usage = {"prompt_tokens": work.tokens - output, "completion_tokens": output}
    text = f"{work.kind} is done: {work.of}."
    return json_response({"model": MODEL, "text": text, "usage": usage})


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:  # noqa: ANN401 - an ASGI application
    """Serve an application on a free port of this machine, and give its address."""
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(
            app,
            host=LOOPBACK,
            port=0,
            on_ready=lambda _, port: ready.set_result(port),
            drain_seconds=DRAIN_SECONDS,
        )
    )
    await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
    try:
        if serving.done():
            serving.result()
        yield f"http://{LOOPBACK}:{ready.result()}"
    finally:
        serving.cancel()
        await asyncio.wait((serving,))


# The agents of the demonstration: they submit what the plan says, over HTTP as any client does.
#
# Rule: the service is never pressed. What it refuses is left out, a service that does not answer is
# asked again after a pause, and time that was slept through is not made up for.

MAX_KNOWN = 100
MAX_LATE_SECONDS = 2.0
PAUSE_SECONDS = 1.0


class DemoFleet:
    """Submits planned tasks when their time has come; `submitted` and `refused` count them."""

    def __init__(self, client: Client, hooks: str) -> None:
        self.submitted = 0
        self.refused = 0
        self._client = client
        self._hooks = hooks
        self._ids: OrderedDict[int, str] = OrderedDict()

    async def run(self, plan: Iterator[PlannedTask]) -> None:
        """Submit one task after the other, until it is cancelled."""
        clock = asyncio.get_running_loop().time
        began = clock()
        for planned in plan:
            early = began + planned.at_seconds - clock()
            if early < -MAX_LATE_SECONDS:
                began -= early
            await asyncio.sleep(max(early, 0.0))
            await self._take(planned)

    async def _take(self, planned: PlannedTask) -> None:
        try:
            await self._submit(planned)
            self.submitted += 1
        except ServiceUnavailableError:
            await asyncio.sleep(PAUSE_SECONDS)
        except ServiceError:
            self.refused += 1

    async def _submit(self, planned: PlannedTask) -> None:
        fields = TaskFields(**planned.fields)
        parents = [self._ids[number] for number in planned.parents if number in self._ids]
        if parents:
            fields["depends_on"] = parents
        if planned.hook is not None:
            fields["callback_url"] = f"{self._hooks}/{planned.hook}"
        task_id = (await self._client.submit(**fields)).task_id
        self._ids[planned.number] = task_id
        if len(self._ids) > MAX_KNOWN:
            self._ids.popitem(last=False)
        if planned.is_cancelled:
            await self._client.cancel(task_id)


# The assistants of the demonstration: they call a model through the gateway, as clients do.

ASSISTANTS = (("support", "chat-assistant"), ("research", "pair-programmer"))
CALLS_PER_SECOND = 1.2
MAX_CALLS = 8
CALL_SECONDS = (0.4, 3.0)
CALL_TOKENS = (400, 6_000)
PATIENCE_SECONDS = 60.0


class DemoAssistants:
    """Makes calls of a model in two projects; `made` and `refused` count them."""

    def __init__(self, client: Client) -> None:
        self.made = 0
        self.refused = 0
        self._client = client

    async def run(self, seed: int) -> None:
        """Make one call after the other, a few at a time, until it is cancelled."""
        drawn = Random(seed)  # noqa: S311 - nothing here is a secret
        turns = asyncio.Semaphore(MAX_CALLS)
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(drawn.expovariate(CALLS_PER_SECOND))
                await turns.acquire()
                made = group.create_task(self._call(drawn))
                made.add_done_callback(lambda _: turns.release())

    async def _call(self, drawn: Random) -> None:
        project, agent = drawn.choice(ASSISTANTS)
        said = {
            "of": drawn.choice(("a refund", "the parser", "an invoice")),
            "seconds": f"{drawn.uniform(*CALL_SECONDS):.2f}",
            "tokens": str(drawn.randint(*CALL_TOKENS)),
        }
        question = {"role": "user", "content": f"What about {said['of']}?"}
        try:
            await self._client.request(
                "POST",
                f"/p/{project}/{agent}/v1/chat/completions",
                response_type=dict[str, Any],
                body={"model": CHAT_MODEL, "messages": [question], "metadata": said},
                timeout_seconds=PATIENCE_SECONDS,
            )
            self.made += 1
        except ServiceError:
            self.refused += 1
            await asyncio.sleep(PAUSE_SECONDS)


WINDOW_MINUTES = 5.0
PERCENT_PER_REQUEST = 0.65
START_SECONDS = 10.0
STOP_SECONDS = 5.0
SETTINGS = "headgate.toml"
TEMPLATE = "demo.toml"
FAILING_SLOTS = frozenset({"retired"})
"""Slots of the settings whose failure is part of what is shown."""

KEYS = {
    "DEMO_KEY_MAIN": "demo-key-main",
    "DEMO_KEY_SPARE": "demo-key-spare",
    "DEMO_KEY_RETIRED": "demo-key-retired",
    "DEMO_KEY_MODEL": "demo-key-model",
}

log = structlog.get_logger("headgate.demo")


class Service(NamedTuple):
    """Where the service is, and the token that it lets the agents in with."""

    address: str
    token: str | None


class Demo:
    """Everything that a demonstration needs beside the service; enter it to start."""

    def __init__(self, seed: int = SEED) -> None:
        self.folder = Path()
        self._seed = seed
        self._thread = threading.Thread(target=self._run, name="headgate-demo", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._addresses: Future[dict[str, str]] = Future()
        self._service: asyncio.Future[Service] | None = None
        self._work: asyncio.Task[None] | None = None

    @property
    def settings_file(self) -> Path:
        """The settings that the service is started with."""
        return self.folder / SETTINGS

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables of the service: the keys of its slots, and none of the user's."""
        return KEYS

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="headgate-demo-"))
        try:
            self._thread.start()
            addresses = self._addresses.result(START_SECONDS)
            template = files("headgate.cli").joinpath(TEMPLATE).read_text(encoding="utf-8")
            self.settings_file.write_text(Template(template).substitute(addresses))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def begin(self, address: str, token: str | None) -> None:
        """Have the agents submit tasks to a service that takes them."""
        loop, service = self._loop, self._service
        if loop is not None and service is not None:
            loop.call_soon_threadsafe(_tell, service, Service(address, token))

    def remove_folder(self) -> None:
        """Remove what was written; for an end at which nothing else is done."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
        loop, work = self._loop, self._work
        if loop is not None and work is not None and not loop.is_closed():
            loop.call_soon_threadsafe(work.cancel)
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        self.remove_folder()

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except asyncio.CancelledError:
            return
        except Exception as error:
            if not self._addresses.done():
                self._addresses.set_exception(error)
            else:
                log.exception("the demonstration has stopped; the service goes on without it")

    async def _live(self) -> None:
        self._loop, self._work = asyncio.get_running_loop(), asyncio.current_task()
        self._service = self._loop.create_future()
        async with AsyncExitStack() as stack:
            provider = await stack.enter_async_context(
                FakeProvider(window_minutes=WINDOW_MINUTES, percent_per_request=PERCENT_PER_REQUEST)
            )
            strict = await stack.enter_async_context(FakeProvider(key="another-key"))
            work = await stack.enter_async_context(served(DemoWorld(provider).serve_request))
            self._addresses.set_result(
                {"provider": provider.address, "strict_provider": strict.address, "work": work}
            )
            service = await self._service
            # Each task is submitted once: what is not taken is left out.
            client = await stack.enter_async_context(
                Client(service.address, token=service.token, retries=0)
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(DemoFleet(client, f"{work}/hooks").run(plan(self._seed)))
                group.create_task(DemoAssistants(client).run(self._seed))


def _tell(future: asyncio.Future[Service], service: Service) -> None:
    if not future.done():
        future.set_result(service)
