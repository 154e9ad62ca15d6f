"""What Ctrl-C leaves half made is dropped without a word.

An event loop without its parts and a coroutine that nobody awaited complain as they are dropped, in
many lines, and whoever pressed Ctrl-C can do nothing about them.
"""

from __future__ import annotations

import gc
import sys
import traceback
import warnings


def forget(interruption: BaseException) -> None:
    """Drop what was going on when a command was interrupted, in silence."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error: BaseException | None = interruption
            while error is not None:
                traceback.clear_frames(error.__traceback__)
                error = error.__context__
            gc.collect()
    finally:
        sys.unraisablehook = before
