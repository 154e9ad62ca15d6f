"""Runs parts of `make torture` side by side: most of their time is spent waiting."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack

from doc_pages import ROOT


def assert_no_broken_promise(checks: Iterable[tuple[str, ...]], *, seconds: float) -> None:
    """Have each of these calls of `python -m torture` end well; if one fails, no other is left."""
    with ExitStack() as ends:
        running = {check: _started(check, ends) for check in checks}
        for check, torture in running.items():
            output, _ = torture.communicate(timeout=seconds)
            assert torture.returncode == 0, f"{' '.join(check)}: {output}"
            assert "broken promises: none" in output


def _started(check: tuple[str, ...], ends: ExitStack) -> subprocess.Popen[str]:
    torture = subprocess.Popen(
        [sys.executable, "-m", "torture", *check],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ends.enter_context(torture)
    # Ctrl-C has it end what it started itself; to one that has ended nothing is sent.
    ends.callback(torture.send_signal, signal.SIGINT)
    return torture
