"""A worker: takes tasks of one agent from a service, and runs them on this machine."""
