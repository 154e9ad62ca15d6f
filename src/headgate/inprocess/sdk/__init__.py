"""Governing what is built on an HTTP client: the SDKs of OpenAI and Anthropic take one of these.

A governed client holds the estimate of a call, waits for its permit, sends it, and books what the
response says was used. It changes nothing that is sent or answered unless it is asked to.
"""

from __future__ import annotations

from headgate.inprocess.sdk.clients import (
    GovernedAsyncTransport,
    GovernedTransport,
    LoopThread,
    UnusableLoopError,
    async_client,
    sync_client,
)
from headgate.inprocess.sdk.governor import Governor, UngovernedRequestError

__all__ = [
    "GovernedAsyncTransport",
    "GovernedTransport",
    "Governor",
    "LoopThread",
    "UngovernedRequestError",
    "UnusableLoopError",
    "async_client",
    "sync_client",
]
