"""Long, violent checks of what is promised under crashes: `python -m torture ledger`."""

import sys
from pathlib import Path

# The servers and the fault proxy are those of the tests.
sys.path.append(str(Path(__file__).parent.parent / "tests"))
