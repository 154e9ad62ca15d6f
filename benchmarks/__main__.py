"""`make bench`: run every benchmark, or those named; exit 1 if a target was missed."""

from __future__ import annotations

import importlib
import sys

ALL = ("decide", "load_ranking", "ledger", "ledger_memory")


def main() -> int:
    names = sys.argv[1:] or list(ALL)
    missed = []
    for name in names:
        if name not in ALL:
            print(f"no benchmark {name}; there are: {', '.join(ALL)}")
            return 2
        if not importlib.import_module(f"benchmarks.{name}").run():
            missed.append(name)
    print(f"\n{len(names) - len(missed)} of {len(names)} targets met", *missed)
    return 1 if missed else 0


sys.exit(main())
