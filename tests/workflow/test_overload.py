"""A step whose endpoint stays overloaded: it says what the endpoint answers, and ends in time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.lifecycle import NOTHING_USED, Failed, Limited, Outcome, Succeeded
from headgate.core.task import Submission
from headgate.executors.executor import WorkOrder
from headgate.workflow.step_executors import WithinTimeout
from run_commands import EXIT_FAILED, Commands

OVERLOADED = "here returned 529: Overloaded"
TIMED_OUT = f"timed out after 20 s: {OVERLOADED}"


def overloaded(seconds: float | None) -> Limited:
    return Limited(retry_after_seconds=seconds, error=OVERLOADED, is_overload=True)


class Simulated:
    """An endpoint that answers as it is told, its executor, and the time."""

    def __init__(self, answer: Outcome) -> None:
        self.now = 1_000.0
        self.answer = answer
        self.sent = 0
        self.executor = WithinTimeout(self, clock=lambda: self.now)

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def execute(self, _order: WorkOrder) -> Outcome:
        """Answer."""
        self.sent += 1
        return self.answer

    async def tried(self, attempt: int = 1, *, seconds: float | None = 20.0) -> Outcome:
        """Try once."""
        order = WorkOrder(
            task_id="t", attempt=attempt, project_id="p", agent_id="a", submission=Submission(),
            attempt_seconds=seconds,
        )  # fmt: skip
        return await self.executor.execute(order)

    async def followed(self, *, seconds: float = 20.0, most: int = 100) -> tuple[Outcome, float]:
        """Try until it ends, as an engine would; return how, and after how long."""
        began = self.now
        for attempt in range(1, most):
            outcome = await self.tried(attempt, seconds=seconds)
            if not isinstance(outcome, Limited):
                return outcome, self.now - began
            assert outcome.retry_after_seconds is not None
            self.now += outcome.retry_after_seconds
        raise AssertionError("it never ends")


@pytest.mark.parametrize("asked", [None, 0.0, 2.0, 7.0, 300.0])
async def test_a_lasting_overload_ends_a_step_at_its_timeout(asked: float | None) -> None:
    outcome, seconds = await Simulated(overloaded(asked)).followed()
    assert outcome == Failed(error=TIMED_OUT, is_transient=True, usage=NOTHING_USED)
    assert seconds == 20.0


@given(asked=st.one_of(st.none(), st.floats(0, 500)), timeout=st.floats(1, 500))
def test_it_never_ends_before_its_timeout_and_hardly_after(
    asked: float | None, timeout: float
) -> None:
    simulated = Simulated(overloaded(asked))
    _, seconds = asyncio.run(simulated.followed(seconds=timeout, most=1_000))
    assert timeout <= seconds + 0.001
    assert seconds <= timeout + 1.001


async def test_an_overload_that_passes_costs_nothing_but_time() -> None:
    simulated = Simulated(overloaded(5.0))
    assert await simulated.tried() == overloaded(5.0)
    simulated.now += 15.0
    assert isinstance(await simulated.tried(2), Limited)
    simulated.now += 4.0
    simulated.answer = Succeeded()
    assert await simulated.tried(3) == Succeeded()
    simulated.answer = overloaded(5.0)
    assert await simulated.tried() == overloaded(5.0)


async def test_what_waited_behind_it_fails_without_asking_again_too_soon() -> None:
    simulated = Simulated(overloaded(300.0))
    await simulated.followed()
    sent = simulated.sent
    other = await simulated.tried()
    assert other == Failed(error=TIMED_OUT, is_transient=True, usage=NOTHING_USED)
    assert simulated.sent == sent
    # One that may take longer is sent, and so is every other once the endpoint has had its time.
    assert isinstance(await simulated.tried(seconds=500.0), Limited)
    simulated.now += 300.0
    simulated.answer = Succeeded()
    assert await simulated.tried() == Succeeded()


@pytest.mark.parametrize(
    "limited", [Limited(retry_after_seconds=3_600.0), Limited(retry_after_seconds=1.0)]
)
async def test_a_limit_that_names_its_end_is_waited_for_however_long(limited: Limited) -> None:
    simulated = Simulated(limited)
    for attempt in range(1, 50):
        assert await simulated.tried(attempt) == limited
        simulated.now += limited.retry_after_seconds or 0.0


async def test_a_limit_that_names_no_end_counts_like_an_overload() -> None:
    outcome, seconds = await Simulated(Limited(error="429")).followed(seconds=100.0)
    assert isinstance(outcome, Failed)
    assert (outcome.error, seconds) == ("timed out after 100 s: 429", 100.0)


WORKFLOW = """
config:
  endpoints:
    here: {{kind: openai, url: "{url}/v1"}}
  prices: {{mine: {{input: 1, output: 1}}}}
  budget_usd: 1.00
steps:
  - id: case
    foreach: [1, 2, 3]
    timeout: 7s
    model: mine
    endpoint: here
    max_tokens: 10
    prompt: hello
"""


class _Overloaded(BaseHTTPRequestHandler):
    retry_after: str | None = None

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(529)
        if self.retry_after is not None:
            self.send_header("Retry-After", self.retry_after)
        self.send_header("Content-Length", "10")
        self.end_headers()
        self.wfile.write(b"Overloaded")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def lasting_overload(retry_after: str | None) -> Iterator[str]:
    """Serve nothing but 529, and give the address."""
    handler = type("Handler", (_Overloaded,), {"retry_after": retry_after})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("retry_after", ["2", None])
def test_a_run_against_a_lasting_overload_shows_its_status_and_ends_in_time(
    tmp_path: Path, retry_after: str | None
) -> None:
    commands = Commands(tmp_path)
    with lasting_overload(retry_after) as url:
        (tmp_path / "w.yaml").write_text(WORKFLOW.format(url=url))
        ended = commands.run("w.yaml")
    assert ended.code == EXIT_FAILED, ended.stderr
    report = ended.json
    assert 6.9 <= report["seconds"] <= 20
    errors = {row["task"]["error"] for row in report["rows"]}
    assert errors == {f"timed out after 7 s: {OVERLOADED}"}
    assert report["money"][0]["spent_micro_usd"] == 0
    assert f": {OVERLOADED}" in ended.stderr
    assert "case[0] waits: paused for " in ended.stderr
    assert "(attempt " in ended.stderr
