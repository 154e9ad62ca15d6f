"""Webhooks on the wire: which addresses may be reached, how a message is signed and sent."""
