"""Compare an answer with what was expected, and write the verdict as JSON."""

import json
import sys

expected, answer = sys.argv[1:]
is_right = answer.strip().casefold() == expected.strip().casefold()
print(json.dumps({"expected": expected, "answer": answer, "is_right": is_right}))
