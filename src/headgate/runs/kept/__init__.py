"""What is kept of a run in its folder, so that it can be resumed."""
