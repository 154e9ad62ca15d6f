"""Runs on a service, over HTTP."""
