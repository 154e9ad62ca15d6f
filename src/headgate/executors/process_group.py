"""A child process and everything that it starts, as one thing that can be ended.

The child leads a session and a group of its own. Rules: it is reaped exactly once, whatever happens
to those who wait for it; its group is ended before it is reaped, because until then nobody else can
get its number; and neither a grandchild that holds the output open nor one that ignores signals can
keep anybody waiting for longer than the grace.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from headgate.executors.capture import Capture

LEFTOVER_SECONDS = 0.5
"""How long what the child left behind may go on writing once the child itself has ended."""


class ProcessGroup:
    """One child, from its start to its end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        cwd: str | None,
        stdin: bytes,
        max_output_bytes: int,
        spare_bytes: int = 0,
    ) -> None:
        self.stdout, self.stderr = _two_captures(max_output_bytes, spare_bytes)
        try:
            self._process = self._started(command, environ, cwd, stdin)
        except BaseException:
            self._close_captures()
            raise
        finally:
            self.stdout.give_away()
            self.stderr.give_away()
        self._exited = asyncio.Event()
        self._watch = self._watched()

    async def finished(self) -> int:
        """Wait until the child has ended by itself, and return its code (negative: a signal)."""
        await self._exited.wait()
        await self._outputs_end(LEFTOVER_SECONDS)
        return self._reaped()

    async def stop(self, grace_seconds: float) -> None:
        """End the whole group: politely, and after the grace by force."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await self._exited.wait()
                await self.stdout.ended.wait()
                await self.stderr.ended.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._exited.wait()
        finally:
            # Also when the loop itself is being torn down, and everything on it cancelled.
            self._reaped()

    def _watched(self) -> _ExitWatch:
        try:
            return _ExitWatch(self._process, self._exited.set)
        except RuntimeError:
            # There is no thread left to wait on, so the child must not be left running.
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._close_captures()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None

    async def _outputs_end(self, most_seconds: float) -> None:
        try:
            async with asyncio.timeout(most_seconds):
                await self.stdout.ended.wait()
                await self.stderr.ended.wait()
        except TimeoutError:
            self.stdout.drain()
            self.stderr.drain()

    def _reaped(self) -> int:
        self._signal(signal.SIGKILL)
        self._watch.close()
        self._close_captures()
        return self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        # The group has its leader's number until the leader is reaped.
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except (ProcessLookupError, PermissionError):
                return

    def _close_captures(self) -> None:
        self.stdout.close()
        self.stderr.close()

    def _started(
        self, command: Sequence[str], environ: Mapping[str, str], cwd: str | None, stdin: bytes
    ) -> subprocess.Popen[bytes]:
        # A file, unlike a pipe, needs nobody to feed it and does not mind a child that never reads.
        with tempfile.TemporaryFile() as file:
            file.write(stdin)
            file.seek(0)
            return subprocess.Popen(  # noqa: S603  the configuration names the command
                command,
                stdin=file,
                stdout=self.stdout.write_end,
                stderr=self.stderr.write_end,
                env=environ,
                cwd=cwd,
                start_new_session=True,
            )


def _two_captures(max_bytes: int, spare_bytes: int) -> tuple[Capture, Capture]:
    first = Capture(max_bytes, spare_bytes)
    try:
        return first, Capture(max_bytes, spare_bytes)
    except OSError:
        first.give_away()
        first.close()
        raise


class _ExitWatch:
    """Calls back, once, when a child has ended, and leaves it to be reaped."""

    def __init__(self, process: subprocess.Popen[bytes], on_exit: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        try:
            self._descriptor: int | None = os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            # Where there are no such descriptors, or none is left, a thread waits instead.
            self._descriptor = None
            threading.Thread(target=self._wait, args=(process,), daemon=True).start()
            return
        self._loop.add_reader(self._descriptor, self._ended)

    def close(self) -> None:
        """Stop watching."""
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _ended(self) -> None:
        self.close()
        self._on_exit()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # A loop that is closed says that nobody waits any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_exit)
