"""Workflows: the file, the run, and what carries out its steps."""
