"""Runs for those who look at them, while they go on or afterwards."""
