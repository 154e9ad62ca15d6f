"""A run as a process of its own: carries out steps of seven cents, and prints what became of them.

Called with a folder and the fields of the options as JSON, or with a folder and a script that the
one step of an interrupted run is.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import msgspec

from workflow.local_stage import RUN_ID, Stage, order, shell, step

STEPS = 8
COST_MICRO_USD = 70_000


async def spend(folder: Path, options: dict[str, object]) -> None:
    """Carry out steps to their ends, and print how many ended how."""
    one = step(shell("true"), cost_micro_usd=COST_MICRO_USD)
    stage = Stage(folder, one, options=options, run_id=f"{RUN_ID}{folder.name}")
    ends = await stage.carried_out(*(order(one, number) for number in range(STEPS)))
    counts = Counter(end.state.value for end in ends)
    sys.stdout.write(msgspec.json.encode(counts).decode())


async def hang(folder: Path, script: str) -> None:
    """Carry out one step that does not end."""
    one = step(shell(script), cost_micro_usd=COST_MICRO_USD)
    async with Stage(folder, one).opened() as (backend, _):
        await backend.submit([order(one)])
        await asyncio.Event().wait()


if __name__ == "__main__":
    place, given = Path(sys.argv[1]), sys.argv[2]
    place.mkdir(exist_ok=True)
    if given.startswith("{"):
        asyncio.run(spend(place, msgspec.json.decode(given)))
    else:
        asyncio.run(hang(place, given))
