"""Looking at tasks in SQL: lists, counts, and which match a filter."""
