"""Task stores: memory, SQLite and PostgreSQL behind the contract of `headgate.store`."""
