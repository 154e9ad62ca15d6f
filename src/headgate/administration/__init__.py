"""Changing a running service: from its file, by hand, and what anybody may ask about that."""

from headgate.administration.changing import Administration, Assembly

__all__ = ["Administration", "Assembly"]
