"""Executors: one module for each way of doing the work of a task."""
