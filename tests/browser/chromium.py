"""Which browser the tests drive: the system's own Chromium, found by its name or by a variable.

As a program it prints the path, or says how to install one and ends with 1.
"""

from __future__ import annotations

import os
import shutil
import sys

VARIABLE = "HEADGATE_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
ADVICE = (
    "no Chromium is here, and these tests need one: install it (apt-get install chromium, "
    f"dnf install chromium, brew install --cask chromium), or set {VARIABLE} to its path"
)


def chromium_path() -> str | None:
    """Return where the browser is; None if there is none."""
    named = os.environ.get(VARIABLE)
    if named:
        return shutil.which(named)
    return next((path for name in NAMES if (path := shutil.which(name))), None)


if __name__ == "__main__":
    found = chromium_path()
    if found is None:
        sys.exit(ADVICE)
    sys.stdout.write(f"{found}\n")
