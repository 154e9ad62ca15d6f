"""Work of a request in slices: between them the loop belongs to others.

Rule: nothing that a client may ask for holds the loop for more than a few milliseconds. What may
take longer, as a body of a megabyte or an answer of thousands of rows, is a generator that yields
within `SLICE_SECONDS` of work. Signs of life, answers to others and the dispatcher go on meanwhile.
"""

from __future__ import annotations

import asyncio
import time

from headgate.core.text import Result, Steps

SLICE_SECONDS = 0.002
"""How long work goes on before others have their turn."""


async def in_slices(steps: Steps[Result]) -> Result:
    """Do work to its end, and give others their turn whenever it has taken a slice of time."""
    began = time.perf_counter()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        if time.perf_counter() - began >= SLICE_SECONDS:
            await asyncio.sleep(0)
            began = time.perf_counter()
