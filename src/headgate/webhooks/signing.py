"""Signatures as Standard Webhooks has them: an HMAC over the id, the time and the body.

Every secret that is valid now signs, so that a receiver may go on with the old one for a while
after a rotation. A signature covers the time, so a try has one of its own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable

_PREFIX = "whsec_"
_VERSION = "v1"


def signature_headers(
    message_id: str, body: bytes, secrets: Iterable[str], *, now: float
) -> dict[str, str]:
    """Return the headers by which a receiver knows the sender and the message."""
    timestamp = str(int(now))
    signed = f"{message_id}.{timestamp}.".encode() + body
    return {
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(_signature(secret, signed) for secret in secrets),
    }


def _signature(secret: str, signed: bytes) -> str:
    digest = hmac.new(_key(secret), signed, hashlib.sha256).digest()
    return f"{_VERSION},{base64.b64encode(digest).decode()}"


def _key(secret: str) -> bytes:
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        # Without the cause: it would repeat the secret.
        raise ValueError("a signing secret is not base64") from None
