"""Where a task's work is done: HTTP endpoint, child process, Python callable."""
