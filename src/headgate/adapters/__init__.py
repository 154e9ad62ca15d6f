"""Governing what is built on an HTTP client: the SDKs of OpenAI and Anthropic take one of these.

A governed client holds the estimate of a call, waits for its place, sends it, and books what the
answer says was used. It changes nothing that is sent or answered unless it is asked to.
"""

from __future__ import annotations

try:
    import httpx2 as _httpx2  # noqa: F401  asked for first, to say which extra brings it
except ModuleNotFoundError as error:
    if error.name != "httpx2":
        raise
    message = "headgate.adapters needs the package httpx2; install headgate[adapters]"
    raise ImportError(message) from None

from headgate.adapters.async_transport import GovernedAsyncTransport
from headgate.adapters.clients import async_client, sync_client
from headgate.adapters.governor import Governor, UngovernedRequestError
from headgate.adapters.loop_thread import LoopThread, UnusableLoopError
from headgate.adapters.sync_transport import GovernedTransport

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
