"""Books on a server that is reached through a fault proxy, and directly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from budgets.fault_proxy import FaultProxy
from budgets.servers import PostgresServer, ValkeyServer
from headgate.budgets.postgres import PostgresBudgetTracker
from headgate.budgets.redis import RedisBudgetTracker
from headgate.budgets.tracker import LedgerTracker


class Proxied:
    """How to reach the same ledger through a proxy and past it."""

    def __init__(
        self,
        *,
        socket_path: Path,
        markers: tuple[bytes, ...],
        direct: Callable[[], LedgerTracker],
        by_port: Callable[[int], LedgerTracker],
    ) -> None:
        self.direct = direct
        self._socket_path = socket_path
        self._markers = markers
        self._by_port = by_port

    def proxy(self, *, seed: int) -> FaultProxy:
        """Make a proxy before the server; run it to get its port."""
        return FaultProxy(self._socket_path, markers=self._markers, seed=seed)

    def through(self, proxy: FaultProxy) -> LedgerTracker:
        """Make a tracker that goes through a running proxy."""
        return self._by_port(proxy.port)


def proxied_redis(server: ValkeyServer) -> Proxied:
    """Put a proxy before a Valkey server; each call of the ledger is one script."""
    return Proxied(
        socket_path=server.socket_path,
        markers=(b"EVALSHA",),
        direct=lambda: RedisBudgetTracker(server.url),
        by_port=lambda port: RedisBudgetTracker(f"redis://127.0.0.1:{port}/0"),
    )


def proxied_postgres(server: PostgresServer) -> Proxied:
    """Put a proxy before a PostgreSQL server; the reply that matters says COMMIT."""
    url = server.new_schema()
    options = url.rpartition("&")[2]
    return Proxied(
        socket_path=server.socket_path,
        markers=(b"COMMIT\0",),
        direct=lambda: PostgresBudgetTracker(url),
        by_port=lambda port: PostgresBudgetTracker(
            f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable&{options}"
        ),
    )
