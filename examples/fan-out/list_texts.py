"""Write which texts there are, as JSON."""

import json
from pathlib import Path

files = sorted(path.name for path in Path("texts").glob("*.txt"))
print(json.dumps({"files": files, "count": len(files)}))
