"""Webhooks in SQL: what is due, what was tried, the secrets that sign."""
