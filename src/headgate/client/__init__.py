"""Clients of a service, with the same verbs: `Client` for asyncio, `SyncClient` for the rest.

They are imported from `headgate`. Nothing is loaded here: who needs the one does not pay for the
other.
"""
