"""A target that notes in a file that it was called."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any


async def note(order: Mapping[str, Any]) -> object:
    """Take a moment, and write a line in one piece."""
    params = order["params"]
    await asyncio.sleep(0.1)
    file = os.open(params["path"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{params['number']}\n".encode())
    finally:
        os.close(file)
    return {"number": params["number"]}
