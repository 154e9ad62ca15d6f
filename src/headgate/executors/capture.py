"""The output of a child process: its beginning is kept, the rest is read and dropped.

Rule: a pipe is drained to its end, or the child would block once it is full. The last bytes are
kept too, because the reason of a failure stands there; more of them than are shown, because what is
to be hidden is only found as a whole.
"""

from __future__ import annotations

import asyncio
import os

_CHUNK_BYTES = 64 << 10
TAIL_BYTES = 2_048
"""How much of the end is shown."""


class Capture:
    """Reads one pipe on the running loop; `write_end` is for the child."""

    def __init__(self, max_bytes: int, spare_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._end_bytes = TAIL_BYTES + spare_bytes
        self._head = bytearray()
        self._tail = b""
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self.ended = asyncio.Event()
        """Set when nobody holds the pipe any more, or when it was closed here."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._read)

    @property
    def is_cut(self) -> bool:
        """Whether there was more than is kept."""
        return bool(self._tail)

    @property
    def head(self) -> bytes:
        """The beginning of the output, up to the cap."""
        return bytes(self._head)

    @property
    def text(self) -> str:
        """The same as a text."""
        return self._head.decode(errors="replace")

    @property
    def end(self) -> bytes:
        """The end of the output: what is shown of it, and as many bytes before as were asked."""
        end = bytes(self._head[-self._end_bytes :]) + self._tail
        return end[-self._end_bytes :]

    def give_away(self) -> None:
        """Let go of the child's end, so that the pipe ends with the child."""
        os.close(self.write_end)

    def drain(self) -> None:
        """Read what is there already, without waiting; a writer that goes on is not followed."""
        for _ in range(self._max_bytes // _CHUNK_BYTES + 2):
            if self.ended.is_set() or not self._read():
                return

    def close(self) -> None:
        """Stop reading, whoever may still write."""
        if not self.ended.is_set():
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self.ended.set()

    def _read(self) -> bool:
        try:
            chunk = os.read(self._read_end, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self.close()
            return False
        room = self._max_bytes - len(self._head)
        self._head += chunk[:room]
        if len(chunk) > room:
            self._tail = (self._tail + chunk[room:])[-self._end_bytes :]
        return True
