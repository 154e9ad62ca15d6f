"""Stand in for a model: read a question, and write an answer with what it used, as JSON.

It knows most capitals, and takes the largest city for the capital of two countries.
"""

import json
import sys

KNOWN = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Australia": "Sydney",
    "Canada": "Ottawa",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Turkey": "Istanbul",
}

question = sys.stdin.read()
answer = next((city for country, city in KNOWN.items() if country in question), "unknown")
usage = {"prompt_tokens": 100, "completion_tokens": 20}
print(json.dumps({"model": "stand-in-1", "answer": answer, "usage": usage}))
