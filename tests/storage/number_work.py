"""Work for a process that writes: a table of numbers, and functions that can be sent."""

from __future__ import annotations

import os
import pickle
import signal
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headgate.storage.sqlite import SqliteDatabase
from headgate.storage.transaction import Transaction
from headgate.storage.writer import Asked, Job, WriterSetup


class PickleWire:
    """Jobs and answers, pickled as they are."""

    def pack(self, job: Job) -> bytes:
        return pickle.dumps((job.work, job.batch))

    def join(self, packed: Sequence[bytes]) -> bytes:
        return pickle.dumps(list(packed))

    def unpack(self, packed: bytes) -> list[Job]:
        return [Job(*pickle.loads(one)) for one in pickle.loads(packed)]

    def pack_answers(self, jobs: Sequence[Job]) -> bytes:
        return pickle.dumps([(job.answer, job.error) for job in jobs])

    def unpack_answers(self, packed: bytes, jobs: deque[Asked]) -> list[Asked]:
        answered = []
        for answer, error in pickle.loads(packed):
            job = jobs.popleft()
            job.answer, job.error = answer, error
            answered.append(job)
        return answered


def writer_setup(path: Path, needed: Path | None = None) -> WriterSetup:
    """Make a writer_setup, unless a file is missing that must be there."""
    if needed is not None and not needed.exists():
        raise FileNotFoundError(f"{needed.name} must be there")
    return WriterSetup(SqliteDatabase(path), PickleWire())


def create(transaction: Transaction) -> None:
    transaction.run("CREATE TABLE IF NOT EXISTS numbers (number INTEGER PRIMARY KEY)")


def add(number: int, transaction: Transaction) -> int:
    transaction.run("INSERT INTO numbers VALUES (?)", (number,))
    return number


def add_all(transaction: Transaction, numbers: Sequence[int]) -> Sequence[Any]:
    """Add numbers as one batch, and answer each with how many there were."""
    for number in numbers:
        add(number, transaction)
    return [len(numbers)] * len(numbers)


def numbers(transaction: Transaction) -> list[int]:
    return [row[0] for row in transaction.read("SELECT number FROM numbers ORDER BY number")]


def add_next(transaction: Transaction) -> None:
    transaction.run("INSERT INTO numbers SELECT COUNT(*) FROM numbers")


def text(length: int, _transaction: Transaction) -> str:
    return "x" * length


def length(text: str, _transaction: Transaction) -> int:
    return len(text)


def die(number: int, transaction: Transaction) -> None:
    """Add a number, and end the process before it is committed."""
    add(number, transaction)
    os.kill(os.getpid(), signal.SIGKILL)


def pid(_transaction: Transaction) -> int:
    return os.getpid()
