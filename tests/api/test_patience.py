"""A store that hangs must not hang its clients."""

from __future__ import annotations

import asyncio

import pytest

from api.asgi_client import answer_of
from api.fake_app import fake_app
from api.fake_engine import FakeEngine
from headgate.api import app as web_app
from headgate.core.task import TaskRecord
from headgate.errors import StoreUnavailableError


class HangingEngine(FakeEngine):
    """Never answers about a task."""

    async def get(self, task_id: str) -> TaskRecord | None:  # noqa: ARG002
        """Wait for ever."""
        await asyncio.Event().wait()
        return None


def test_a_request_that_nobody_answers_is_503_and_says_that_its_fate_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_app, "ANSWER_SECONDS", 0.02)

    async def main() -> None:
        app = fake_app(HangingEngine())
        answers = await asyncio.gather(
            *(answer_of(app, "GET", f"/tasks/t{n}") for n in range(3)),
            answer_of(app, "GET", "/livez"),
        )
        assert [answer.status for answer in answers] == [503, 503, 503, 200]
        assert answers[0].json["code"] == "unavailable"
        assert "not known" in answers[0].json["error"]

    asyncio.run(main())


def test_a_request_that_is_cancelled_by_its_server_stays_cancelled() -> None:
    async def main() -> None:
        app = fake_app(HangingEngine())
        request = asyncio.ensure_future(answer_of(app, "GET", "/tasks/t"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    asyncio.run(main())


def test_a_store_that_is_not_open_yet_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.failure = StoreUnavailableError("the database is closed; open it again")

    async def ask() -> tuple[int, str]:
        answer = await answer_of(fake_app(engine), "GET", "/tasks/t")
        return answer.status, answer.json["error"]

    engine.opened.clear()
    status, line = asyncio.run(ask())
    assert (status, "is starting" in line, caplog.messages) == (503, True, [])
    engine.opened.set()
    status, line = asyncio.run(ask())
    assert (status, "is starting" in line) == (503, False)
    assert "the database is closed" in caplog.messages[0]
