"""`python -m headgate` is the `headgate` command; Ctrl-C ends it with 130, whenever it comes.

Python raises Ctrl-C where the main thread happens to be. Within a callback of the interpreter, such
as that of the lock of an import, an exception goes to a hook and no further, and the command would
go on as if nobody had wanted it to end.
"""

from __future__ import annotations

import os
import sys
import threading

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
# What an event loop says to whoever comes when it has ended.
LOOP_HAS_ENDED = "Event loop is closed"


def main() -> None:
    """Run the command; Ctrl-C while it is being loaded is no reason for a traceback."""
    if sys.platform == "win32":
        # Much of what follows cannot even be loaded there.
        sys.stderr.write(
            "headgate: Windows is not supported; run headgate in WSL (wsl --install)\n"
        )
        sys.exit(EXIT_BAD_INPUT)
    sys.unraisablehook = _leave_if_interrupted
    threading.excepthook = _tell_unless_the_loop_has_ended
    try:
        from headgate.cli.main import main as command  # noqa: PLC0415

        command()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except RuntimeError as error:
        # Python 3.11 wraps Ctrl-C within `__set_name__` in one of these.
        if isinstance(error.__cause__, KeyboardInterrupt):
            sys.exit(EXIT_INTERRUPTED)
        raise


def _leave_if_interrupted(lost: sys.UnraisableHookArgs) -> None:
    if issubclass(lost.exc_type, KeyboardInterrupt):
        os._exit(EXIT_INTERRUPTED)
    sys.__unraisablehook__(lost)


def _tell_unless_the_loop_has_ended(lost: threading.ExceptHookArgs) -> None:
    """Tell what ended a thread, unless it only came too late to report to a loop that has ended.

    Mostly that is after Ctrl-C, but it is not asked whether there was one: a thread that finds its
    loop closed has nobody left to tell, and no reader could do anything about it.
    """
    if not (lost.exc_type is RuntimeError and str(lost.exc_value) == LOOP_HAS_ENDED):
        threading.__excepthook__(lost)


if __name__ == "__main__":
    main()
