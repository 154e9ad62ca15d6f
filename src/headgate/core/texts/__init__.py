"""Texts: how figures and names are written, found and kept harmless."""
