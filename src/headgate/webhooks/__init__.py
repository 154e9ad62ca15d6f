"""Sending one webhook: which addresses are allowed, how it is signed, one request."""
