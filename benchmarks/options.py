"""What may be asked of a run; benchmarks that take no options ignore them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PEERS_PYTHON = ROOT / ".venv-bench/bin/python"
GATEWAYS = ROOT / ".venv-gateways"
QUEUED = 500_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """`quick` runs everything once and small, and judges nothing: it shows that it all works."""

    quick: bool = False
    queued: int = QUEUED
    peers_python: Path = PEERS_PYTHON
    gateways: Path = GATEWAYS
