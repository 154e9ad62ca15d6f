"""The tables of workers: whom each serves, and the tasks that it has.

A worker has a row among the nodes, too, with its places and its lease. `offered_until` is when its
offer of places lapses, if it makes none anew. What it has is kept apart from the tasks, because
tasks are not found by their node.
"""

from __future__ import annotations

from headgate.databases.migrations import first_migration
from headgate.databases.transaction import Insert

PART = "workers"

_TABLES = """
CREATE TABLE workers (
    node_id {text} PRIMARY KEY,
    agent_id {text} NOT NULL,
    lease_seconds DOUBLE PRECISION NOT NULL,
    offered_until DOUBLE PRECISION NOT NULL
) {by_key};
CREATE TABLE worker_tasks (
    node_id {text},
    task_id {text},
    PRIMARY KEY (node_id, task_id)
) {by_key}
"""

MIGRATIONS = (first_migration(_TABLES),)

WORKER_TASKS = Insert(table="worker_tasks", columns=(("node_id", "TEXT"), ("task_id", "TEXT")))
