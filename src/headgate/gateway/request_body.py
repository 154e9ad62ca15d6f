"""The body of a call: in memory, or in a file without a name while the call waits.

A coding agent sends hundreds of kilobytes with every request, and hundreds of its calls may wait
for hours. What waits for longer than a moment is written to disk, and read when it has its turn.

Rule: a caller has its share of the disk and of the open files, as of memory. A body counts where it
is: on the disk as long as it has a file. One for which there is no room there stays in memory.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import tempfile
from pathlib import Path
from typing import BinaryIO

import structlog

from headgate.api.shares import Holder, SpillRoom

log = structlog.get_logger("headgate.gateway")

LEAST_BYTES = 64 * 1024
"""A shorter body stays in memory; a file costs about as much."""

LEAST_FREE_BYTES = 256 * 1024 * 1024
"""So much of a disk is left to others, the store first."""


class RequestBody:
    """The bytes that a client has sent, which go upstream."""

    __slots__ = ("_bytes", "_file", "_hash", "_room", "_stays", "size")

    def __init__(self, body: bytes, digest: hashlib._Hash | None = None) -> None:
        self._bytes: bytes | None = body
        self._hash = digest
        self._file: BinaryIO | None = None
        self._room: tuple[SpillRoom, str, int] | None = None
        """The room that its file has on the disk, whose it is and how much."""

        self._stays = False
        self.size = len(body)

    @property
    def may_spill(self) -> bool:
        """Whether it is in memory, and large enough to be worth a file."""
        return self._bytes is not None and self.size >= LEAST_BYTES and not self._stays

    def hash(self) -> hashlib._Hash:
        """Return the hash of what the client has sent, to go on with."""
        if self._hash is None:
            if self._bytes is None:
                message = "the body was let go of before its hash was asked for"
                raise RuntimeError(message)
            self._hash = hashlib.sha256(self._bytes)
        return self._hash.copy()

    async def spill(self, room: SpillRoom, holder: Holder, folder: Path) -> bool:
        """Write it to a file and forget it; False if it stays in memory, as on a full disk."""
        body = self._bytes
        if body is None:
            return False
        if not room.take(holder, self.size):
            return False
        self._room = (room, holder.key, self.size)
        try:
            written = asyncio.to_thread(_written, body, self._hash, folder)
            self._file, self._hash = await written
        except OSError as error:
            log.warning("the body of a call that waits stays in memory", problem=str(error))
            self._stays = True
            self.leave_room()
            return False
        self._bytes = None
        return True

    @property
    def at_once(self) -> bytes | None:
        """The body, if it is in memory."""
        return self._bytes

    def leave_room(self) -> None:
        """Count its file no more: it is about to be read, and another may take its room."""
        if self._room is not None:
            room, key, size = self._room
            self._room = None
            room.give_back(key, size)

    async def read(self) -> bytes:
        """Return it, from its file if it is there."""
        if self._bytes is None:
            if self._file is None:
                message = "the body was let go of"
                raise RuntimeError(message)
            self._bytes = await asyncio.to_thread(_read, self._file)
            self._file = None
            self.leave_room()
        return self._bytes

    def change(self, body: bytes) -> None:
        """Have another body from now on; its hash is that of what the client has sent."""
        self.hash()
        self.let_go()
        self._bytes, self.size = body, len(body)

    def let_go(self) -> None:
        """Forget it: the call is answered, or over."""
        self._bytes = None
        if self._file is not None:
            self._file.close()
            self._file = None
        self.leave_room()


def _written(
    body: bytes, digest: hashlib._Hash | None, folder: Path
) -> tuple[BinaryIO, hashlib._Hash]:
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < len(body) + LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    # The system deletes it when it is closed, however this process ends.
    file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115
    try:
        left = memoryview(body)
        while left:
            left = left[file.write(left) :]
    except BaseException:
        file.close()
        raise
    return file, hashlib.sha256(body) if digest is None else digest


def _read(file: BinaryIO) -> bytes:
    with file:
        file.seek(0)
        return file.read()
