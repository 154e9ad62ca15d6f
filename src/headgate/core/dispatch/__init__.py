"""The desk: the dispatcher's picture of everything that waits and runs, and what it is made of."""
