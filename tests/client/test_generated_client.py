"""The synchronous client is what the asynchronous one gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "scripts/generate_sync_client.py"


def test_the_committed_client_is_the_generated_one() -> None:
    check = [sys.executable, str(SCRIPT), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
