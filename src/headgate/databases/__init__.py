"""Databases: connections, transactions, migrations and the group-commit writer."""
