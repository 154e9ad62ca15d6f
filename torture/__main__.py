"""`make torture`: run every check, or those named; exit 1 if a promise was broken."""

from __future__ import annotations

import argparse
import importlib
import sys

ALL = (
    *("ledger", "replies", "service", "nodes", "api", "webhooks", "keys", "reloads", "slots"),
    *("runs", "tenants", "gateway", "failover", "redis_failover", "upgrade"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument("check", nargs="?", choices=ALL, help="one of them; without, all")
    parser.add_argument(
        "--backend",
        action="append",
        help="sqlite, redis or postgres, of runs local, server or local-unknown, of ledgers on"
        " Redis also redis-server, sentinel and cluster; several",
    )
    parser.add_argument("--kills", type=int, default=200, help="processes to kill a backend")
    parser.add_argument("--seconds", type=float, default=0.0, help="shortest time a backend")
    parser.add_argument("--drops", type=int, default=10_000, help="replies to lose a backend")
    parser.add_argument("--examples", type=int, default=300, help="requests a route and kind")
    parser.add_argument("--reloads", type=int, default=1_000, help="reloads a backend")
    parser.add_argument("--calls", type=int, default=10_000, help="gateway: calls a backend")
    parser.add_argument("--slots", type=int, default=1_000, help="slots: how many")
    parser.add_argument("--failovers", type=int, default=50, help="failovers a backend")
    parser.add_argument(
        "--versions", type=int, default=3, help="upgrade: from how many, the latest first"
    )
    parser.add_argument("--days", type=int, default=7, help="slots: virtual days")
    parser.add_argument(
        "--estimates",
        choices=("given", "none", "both"),
        default="both",
        help="service: whether its tasks bring an estimate",
    )
    parser.add_argument(
        "--escrow", choices=("on", "off", "both"), default="both", help="gateway: how money is held"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    broken = [
        name
        for name in ([options.check] if options.check else ALL)
        if not importlib.import_module(f"torture.{name}").run(options)
    ]
    print(f"\nbroken promises: {', '.join(broken) or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
