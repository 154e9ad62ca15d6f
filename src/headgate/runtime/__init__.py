"""The loops that make tasks move: one a file, each with a `run_once` that tests call."""
