"""Frames on a stream between two processes of this program: a length, then as many bytes.

Both ends are ours, so a frame is taken as it comes; how large one becomes is for the sender. One
that begins with a zero byte, as no job or answer does, is why a process ends.
"""

from __future__ import annotations

import struct

RECEIVE_BYTES = 2**18
LAST_WORDS = b"\0"

_LENGTH = struct.Struct("<I")


def framed(payload: bytes) -> bytes:
    """Return a payload as it is sent."""
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Cuts what has arrived into frames, whatever the pieces were in which it came."""

    def __init__(self) -> None:
        self._arrived = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Take a piece in, and return the frames that are complete."""
        arrived = self._arrived
        arrived += piece
        complete: list[bytes] = []
        start = 0
        while len(arrived) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(arrived, start)[0]
            if len(arrived) < end:
                break
            complete.append(bytes(arrived[begin:end]))
            start = end
        del arrived[:start]
        return complete
