"""Join what was found of each text, and write it as JSON; lists come as JSON in variables."""

import json
import os
from pathlib import Path

counted, lines = (json.loads(os.environ[name]) for name in ("WORDS", "LINES"))
words = {Path(name).name: int(count) for count, name in (line.split() for line in counted)}
joined = {"words": words, "first_line": min(text.splitlines()[0] for text in lines)}
print(json.dumps(joined))
