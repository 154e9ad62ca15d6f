"""What the exit code of a command tells a script; the command line reference has the list."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_UNAVAILABLE = 3
EXIT_EXHAUSTED = 3
"""Of `headgate run` alone, where a service that does not answer is a failure."""
EXIT_NOT_ALLOWED = 4
EXIT_TIMEOUT = 5
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
