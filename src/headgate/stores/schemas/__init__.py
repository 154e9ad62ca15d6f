"""The tables of a store, subject by subject, each with its own migrations."""
