"""Measurements: each module has a `run` that prints figures and says whether its target was met."""
