"""Runs: a workflow carried out to its end, here or on a service, so that it can be resumed."""
