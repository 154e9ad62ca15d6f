"""Administration in SQL: overrides, tokens, and who changed what."""
