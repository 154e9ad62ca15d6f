"""A service that dies with its answers unread: whoever sends again with the key gets them."""

from __future__ import annotations

import socket
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from headgate.app import STORE_FILE
from service.keyed_load import WAITS, KeyedClients, send
from service.support import running_service, wait_until

CLIENTS = 3
KILLS = 2
KEYS_BETWEEN = 20


def task_ids(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / "data" / STORE_FILE)) as database:
        return [row[0] for row in database.execute("SELECT id FROM tasks")]


def test_a_reply_that_was_lost_with_the_process_is_given_by_the_next(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        body = msgspec.json.encode(WAITS)
        head = b"POST /tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nIdempotency-Key: k-1\r\n"
        place = urlsplit(service.address)
        with socket.create_connection((place.hostname, place.port)) as client:
            client.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            # The task is on disk from here on, and nobody has read that it was taken.
            wait_until(lambda: task_ids(tmp_path), seconds=30.0)
            service.kill()
        service.start()
        answer, is_replay = send(service, "k-1", WAITS)
        assert (answer.status, is_replay) == (202, True)
        assert task_ids(tmp_path) == [answer.body["taskId"]]
        assert service.task(answer.body["taskId"])["state"] == "queued"
        assert send(service, "k-1", WAITS | {"priority": 1})[0].status == 422


def test_each_key_has_one_task_however_often_the_service_is_killed(tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    keys = ("max_queue_size", "max_per_agent", "max_scheduled")
    limits.write_text("[scheduler]\n" + "".join(f"{key} = 100_000\n" for key in keys))
    with running_service(tmp_path, "--config", str(limits)) as service:
        clients = KeyedClients(service, clients=CLIENTS)
        clients.start()
        try:
            for kill in range(1, KILLS + 1):
                wait_until(partial(has_keys, clients, kill * KEYS_BETWEEN), seconds=30.0)
                service.kill()
                service.start()
            wait_until(partial(has_keys, clients, (KILLS + 1) * KEYS_BETWEEN), seconds=30.0)
        finally:
            clients.stop()
        answered = [answer.body["taskId"] for answer in clients.answers.values()]
        assert sorted(answered) == sorted(task_ids(tmp_path))
        assert clients.wrong == []
        assert clients.replays


def has_keys(clients: KeyedClients, number: int) -> bool:
    return len(clients.answers) >= number
