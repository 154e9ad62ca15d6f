"""The command line: a folder of commands, what they are made of, and `main` as the edge."""
