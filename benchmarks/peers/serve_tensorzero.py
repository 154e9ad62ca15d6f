"""TensorZero's gateway over HTTP, out of its Python package; prints its address when it is up.

python -m benchmarks.peers.serve_tensorzero SETTINGS [VALKEY_URL]
"""

from __future__ import annotations

import signal
import sys

from tensorzero.tensorzero import _start_http_gateway


def main() -> None:
    settings, *valkey = sys.argv[1:]
    gateway = _start_http_gateway(
        config_file=settings,
        clickhouse_url=None,
        postgres_url=None,
        valkey_url=valkey[0] if valkey else None,
        async_setup=False,
    )
    print(f"address {gateway.base_url}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
