"""A whole service in this process, with its API, on a store in memory or in a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from api.asgi_client import Response, answer_of
from headgate.app import Service, build_app, build_service
from headgate.config.loading import Origin, load

WORK = """
[targets.work]
kind = "callable"
entry_point = "config.reload_work:work"
default = true
"""
FAST = "[scheduler]\ntick_seconds = 0.05\ntask_retention_seconds = 600\n"


class Running:
    """A service that runs, its file, and a client."""

    def __init__(self, service: Service, path: Path) -> None:
        self.service = service
        self.path = path
        self.app = build_app(service)

    async def ask(self, method: str, url: str, body: object = None) -> Response:
        """Send a request, and return the answer."""
        sent = b"" if body is None else json.dumps(body).encode()
        return await answer_of(self.app, method, url, sent)

    async def get(self, url: str) -> Any:
        """Return the JSON of something that is there."""
        response = await self.ask("GET", url)
        assert response.status == 200, response.body
        return response.json

    async def submit(self, **fields: Any) -> str:
        """Submit a task that is taken, and return its id."""
        body = {"agentId": "a", "action": "run", **fields}
        response = await self.ask("POST", "/tasks", body)
        assert response.status == 202, response.body
        return str(response.json["taskId"])

    async def ended(self, task_id: str) -> Any:
        """Return a task when it has ended."""
        async with asyncio.timeout(30.0):
            while True:
                task = await self.get(f"/tasks/{task_id}")
                if task["state"] not in ("queued", "assigned", "running"):
                    return task
                await asyncio.sleep(0.01)

    async def why(self, task_id: str) -> list[str]:
        """Return the messages of why a task waits, when it has been looked at."""
        async with asyncio.timeout(30.0):
            while not (found := await self.get(f"/tasks/{task_id}/why"))["reasons"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return [reason["message"] for reason in found["reasons"]]


@asynccontextmanager
async def running(
    folder: Path,
    text: str,
    *,
    store: str = "memory:",
    name: str = "headgate.toml",
    options: dict[str, object] | None = None,
) -> AsyncIterator[Running]:
    """Start a service with a file, and stop it in the end."""
    path = folder / name
    path.write_text(text)
    loaded = load(Origin(path=path, options={"store.url": store, **(options or {})}))
    service = build_service(loaded.settings, data=folder, environ={}, loaded=loaded)
    await service.engine.start()
    try:
        yield Running(service, path)
    finally:
        await service.engine.stop(drain_seconds=0.5)
