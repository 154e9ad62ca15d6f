"""The budget tracker for programs, and the ledgers it can use."""
