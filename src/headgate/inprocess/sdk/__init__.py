"""Governing what is built on an HTTP client: the SDKs of OpenAI and Anthropic take one of these.

A governed client holds the estimate of a call, waits for its permit, sends it, and books what the
response says was used. It changes nothing that is sent or answered unless it is asked to.
"""

from __future__ import annotations

try:
    import httpx2 as _httpx2  # noqa: F401  asked for first, to say which extra brings it
except ModuleNotFoundError as error:
    if error.name != "httpx2":
        raise
    message = "headgate.sdk needs the package httpx2; install headgate[sdk]"
    raise ImportError(message) from None

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
