"""What a database does without a service: tasks stored, claimed and completed in groups.

Each of the three steps of a group is a commit of its own, as safe on disk as the service's. There
is no decision, no money and no client: nothing that keeps the three promises can be faster.
"""

from __future__ import annotations

import time

from headgate.storage.transaction import Database, Insert

GROUP = 200
LONGER = 10
STEPS = ("queued", "running", "done")
ROWS = Insert(
    table="floor_tasks",
    columns=(("id", "TEXT"), ("state", "TEXT")),
    key=("id",),
    updated=("state",),
)


def floor(database: Database, *, tasks: int, runs: int) -> float:
    """Return how many tasks a second go through all steps, in the best of some runs.

    A run takes as long as one of the service: a disk that is quick for a tenth of a second would
    count for the floor alone.
    """
    try:
        return max(_run(database, LONGER * tasks) for _ in range(runs))
    finally:
        database.close()


def _run(database: Database, tasks: int) -> float:
    _create(database)
    started = time.perf_counter()
    for start in range(0, tasks, GROUP):
        ids = [f"{number:012}" for number in range(start, min(start + GROUP, tasks))]
        for state in STEPS:
            database.begin().insert(ROWS, [(task_id, state) for task_id in ids])
            database.commit()
    return tasks / (time.perf_counter() - started)


def _create(database: Database) -> None:
    transaction = database.begin()
    transaction.run("DROP TABLE IF EXISTS floor_tasks")
    transaction.run("CREATE TABLE floor_tasks (id TEXT PRIMARY KEY, state TEXT NOT NULL)")
    database.commit()
