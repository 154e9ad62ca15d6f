"""The command line: one module a command, and `main` as the edge."""
