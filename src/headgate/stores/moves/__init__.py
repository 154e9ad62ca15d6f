"""The moves of a task in SQL: submitted, assigned, collected, settled, ended."""
