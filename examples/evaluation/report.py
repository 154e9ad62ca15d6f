"""Read all verdicts, null for a case without one, and write how many are right as JSON."""

import json
import sys

verdicts = [verdict for verdict in json.load(sys.stdin) if verdict is not None]
wrong = [verdict for verdict in verdicts if not verdict["is_right"]]
report = {
    "cases": len(verdicts),
    "right": len(verdicts) - len(wrong),
    "wrong": [f"{each['answer']} instead of {each['expected']}" for each in wrong],
}
print(json.dumps(report))
