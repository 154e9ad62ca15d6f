"""Read all verdicts, null for a case without one, and write how many are right as JSON."""

import json
import sys
from pathlib import Path

verdicts = [verdict for verdict in json.load(sys.stdin) if verdict is not None]
wrong = [verdict for verdict in verdicts if not verdict["is_right"]]
report = {
    "cases": len(verdicts),
    "right": len(verdicts) - len(wrong),
    "wrong": [f"{each['answer']} instead of {each['expected']}" for each in wrong],
}
Path("report.json").write_text(json.dumps(report, indent=2) + "\n")
print(json.dumps(report))
