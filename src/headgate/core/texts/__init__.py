"""Texts: how figures and names are written and found, what JSON may be, and what is harmless."""
