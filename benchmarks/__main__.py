"""`make bench`: run every benchmark, or those named; exit 1 if a target was missed."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.options import GATEWAYS, PEERS_PYTHON, QUEUED, Options

ALL = (
    *("decide", "scale", "load_ranking", "estimates", "inprocess", "ledger", "ledger_memory"),
    *("engine", "nodes", "workers", "gateway", "kept", "slots", "runs", "dashboard"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"some of {', '.join(ALL)}; without, all")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small, and judges nothing (not for decide, load_ranking, ledger, kept, slots)",
    )
    parser.add_argument("--queued", type=int, default=QUEUED, help="engine: tasks of a long queue")
    parser.add_argument(
        "--peers",
        type=Path,
        default=PEERS_PYTHON,
        metavar="PYTHON",
        help="who has other queues and schedulers",
    )
    parser.add_argument(
        "--gateways",
        type=Path,
        default=GATEWAYS,
        metavar="FOLDER",
        help="the environment that has other gateways",
    )
    given = parser.parse_args()
    names = given.name or ALL
    if unknown := [name for name in names if name not in ALL]:
        parser.error(f"no benchmark {unknown[0]}; there are: {', '.join(ALL)}")
    options = Options(
        quick=given.quick,
        queued=given.queued,
        peers_python=given.peers,
        gateways=given.gateways,
    )
    missed = [
        name for name in names if not importlib.import_module(f"benchmarks.{name}").run(options)
    ]
    print(f"\n{len(names) - len(missed)} of {len(names)} targets met", *missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
