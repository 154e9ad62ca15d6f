"""What is kept on disk: the contract of a task store, and its implementations."""
