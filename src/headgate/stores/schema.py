"""The schema of a store: the tables of every subject, each with its own numbered migrations."""

from __future__ import annotations

from headgate.databases.migrations import migrate
from headgate.databases.transaction import Transaction
from headgate.ledgers import sql_schema
from headgate.stores import slots
from headgate.stores.administering import tokens
from headgate.stores.looking import usage_rows
from headgate.stores.moves import keyed_submits
from headgate.stores.schemas import administration as administration_schema
from headgate.stores.schemas import deliveries as delivery_schema
from headgate.stores.schemas import tasks as task_schema
from headgate.stores.schemas import workers as worker_schema

PARTS = (
    (sql_schema.PART, sql_schema.MIGRATIONS),
    (task_schema.PART, task_schema.MIGRATIONS),
    (delivery_schema.PART, delivery_schema.MIGRATIONS),
    (keyed_submits.PART, keyed_submits.MIGRATIONS),
    (tokens.PART, tokens.MIGRATIONS),
    (usage_rows.PART, usage_rows.MIGRATIONS),
    (administration_schema.PART, administration_schema.MIGRATIONS),
    (worker_schema.PART, worker_schema.MIGRATIONS),
    (slots.PART, slots.MIGRATIONS),
)


def migrate_all(transaction: Transaction) -> None:
    """Bring all tables up to date; newer ones than the program's are refused."""
    for part, migrations in PARTS:
        migrate(transaction, part, migrations)
