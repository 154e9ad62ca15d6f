"""The `headgate` command: one module for each command."""
