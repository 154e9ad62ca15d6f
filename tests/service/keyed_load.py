"""Clients that submit under keys, and send again whatever was not answered."""

from __future__ import annotations

import http.client
import threading
from contextlib import closing
from urllib.parse import urlsplit

import msgspec

from service.support import Answer, ServiceProcess

WAITS = {"agentId": "a", "action": "work", "notBefore": "2100-01-01T00:00:00Z"}
"""A task that stays where it is, so that all of them can be counted at the end."""

PAUSE_SECONDS = 0.05
EVERY = 4


def send(service: ServiceProcess, key: str, body: object) -> tuple[Answer, bool]:
    """Submit with a key; tell whether the answer is one that was given before."""
    connection = http.client.HTTPConnection(urlsplit(service.address).netloc, timeout=10.0)
    with closing(connection):
        connection.request("POST", "/tasks", msgspec.json.encode(body), {"Idempotency-Key": key})
        response = connection.getresponse()
        answer = Answer(response.status, msgspec.json.decode(response.read()))
        return answer, response.headers["Idempotency-Replayed"] == "true"


class KeyedClients:
    """Threads that submit without pause; `answers` has what each key was answered with."""

    def __init__(self, service: ServiceProcess, *, clients: int) -> None:
        self.answers: dict[str, Answer] = {}
        self.wrong: list[str] = []
        self.replays = 0
        self.lost = 0
        self._service = service
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._submit, args=(number,)) for number in range(clients)
        ]

    def start(self) -> None:
        """Begin to submit."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Submit nothing new, and wait for the answers to what was sent."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _submit(self, client: int) -> None:
        number = 0
        while not self._is_over.is_set():
            key = f"client-{client}-{number}"
            self.answers[key] = self._insist(key)
            if number % EVERY == 0 and self._insist(key) != self.answers[key]:
                self.wrong.append(key)
            number += 1

    def _insist(self, key: str) -> Answer:
        while True:
            try:
                answer, is_replay = send(self._service, key, WAITS | {"labels": {"key": key}})
            except (OSError, http.client.HTTPException):
                # It may have been taken or not; only the service can tell, when it is back.
                self.lost += 1
                threading.Event().wait(PAUSE_SECONDS)
                continue
            if answer.status in (429, 503):
                threading.Event().wait(PAUSE_SECONDS)
                continue
            self.replays += is_replay
            return answer
