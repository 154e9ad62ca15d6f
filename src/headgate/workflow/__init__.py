"""A workflow in a file: its types, how it is read, filled and counted. Nothing here runs it."""
