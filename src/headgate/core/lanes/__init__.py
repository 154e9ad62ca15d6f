"""Lanes: where tasks wait, in which order, and whose turn it is among them."""
