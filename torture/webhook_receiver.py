"""A bad receiver of webhooks: it fails, hangs, redirects, hangs up, and restarts.

It lives in the torturing process, so what it was told outlives the service. It counts as told only
what it has answered with a 2xx, and only if the signature is right.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
from standardwebhooks.webhooks import Webhook

from executors.endpoint import Endpoint, Seen, free_port, reply

HANG_SECONDS = 3.0
UP_SECONDS, DOWN_SECONDS = (0.5, 3.0), (0.1, 1.0)
DRAWS = (("fail", 0.1), ("hang", 0.03), ("redirect", 0.05), ("hang up", 0.05))


@dataclass
class Told:
    """What the receiver was told of one task."""

    message_ids: set[str] = field(default_factory=set)
    bodies: set[bytes] = field(default_factory=set)
    events: set[str] = field(default_factory=set)
    came: int = 0
    taken: int = 0


class Receiver:
    """Serves on one port, with pauses, until it is closed."""

    def __init__(self, seed: int) -> None:
        self.port = free_port()
        self.told: dict[str, Told] = {}
        self.answers: dict[str, int] = {}
        self.redirected = 0
        self.forged = 0
        self.restarts = 0
        self.is_good = False
        self.secrets: list[str] = []
        self._draws = random.Random(seed)
        self._endpoint = Endpoint()
        self._endpoint.answer = self._answer

    @property
    def url(self) -> str:
        """The address that tasks name; what it has behind the question mark must not be logged."""
        return f"http://127.0.0.1:{self.port}/hook?key=CANARY"

    async def serve(self) -> None:
        """Serve until cancelled, and be away now and then."""
        while True:
            server = await asyncio.start_server(self._endpoint.serve, "127.0.0.1", self.port)
            async with server:
                await asyncio.sleep(3_600 if self.is_good else self._draws.uniform(*UP_SECONDS))
            self.restarts += 1
            await asyncio.sleep(self._draws.uniform(*DOWN_SECONDS))

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        kind = "take" if self.is_good else self._drawn()
        self.answers[kind] = self.answers.get(kind, 0) + 1
        if seen.path.startswith("/elsewhere"):
            self.redirected += 1
        self._note(seen, is_taken=kind == "take")
        if kind == "hang":
            await asyncio.sleep(HANG_SECONDS)
        elif kind != "hang up":
            writer.write(_ANSWERS[kind])
            await writer.drain()
        writer.close()

    def _note(self, seen: Seen, *, is_taken: bool) -> None:
        if not self._is_signed(seen):
            self.forged += 1
            return
        told = self.told.setdefault(seen.headers["x-headgate-task-id"], Told())
        told.message_ids.add(seen.headers["webhook-id"])
        told.bodies.add(seen.body)
        told.events.add(seen.headers["x-headgate-event"])
        told.came += 1
        told.taken += is_taken

    def _is_signed(self, seen: Seen) -> bool:
        for secret in self.secrets:
            try:
                Webhook(secret).verify(seen.body, seen.headers)
            except Exception:  # noqa: BLE001 - the next secret may be the one
                continue
            return True
        return not self.secrets

    def _drawn(self) -> str:
        draw = self._draws.random()
        for kind, ratio in DRAWS:
            draw -= ratio
            if draw < 0:
                return kind
        return "take"


_ANSWERS = {
    "take": reply(204),
    "fail": reply(500, b"not today"),
    "redirect": reply(302, Location="/elsewhere"),
}


def told_state(told: Told) -> list[Any]:
    """Return the states that were told; one that keeps its word tells one."""
    return sorted({msgspec.json.decode(body)["state"] for body in told.bodies})
