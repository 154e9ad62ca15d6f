"""Measurements: each module has a `run` that prints figures and says whether its target was met."""

import sys
from pathlib import Path

# The servers and the service are started as the tests start them.
sys.path.append(str(Path(__file__).parent.parent / "tests"))
