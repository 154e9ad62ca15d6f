"""Runs in this process: an engine of their own, without a service."""
