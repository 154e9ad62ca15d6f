"""Twenty processes spend from one budget of a dollar, and together they never pass it.

Run it with `python docs/examples/shared_budget.py`; a URL as its argument names another ledger.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import tempfile

from headgate import BudgetExceededError, connect_budget

SESSION = "session:tutorial"
PROCESSES = 20
ESTIMATE_USD = "0.03"
ACTUAL_USD = "0.02"


async def work(url: str, number: int) -> None:
    """Call a provider until the shared budget is used up."""
    async with connect_budget(url) as tracker:
        while True:
            try:
                token = await tracker.reserve(f"{SESSION}/workflow:w{number}", ESTIMATE_USD)
            except BudgetExceededError as refusal:
                if refusal.may_clear:
                    # Others hold money that they may not need in the end.
                    await asyncio.sleep(0.05)
                    continue
                return
            await tracker.dispatched(token)
            await asyncio.sleep(0.01)  # Here the provider would be called.
            await tracker.commit(token, ACTUAL_USD)


def process(url: str, number: int) -> None:
    """Run one worker; each has its own connection to the ledger."""
    asyncio.run(work(url, number))


async def set_budget(url: str) -> None:
    """Give the session one dollar."""
    async with connect_budget(url) as tracker:
        await tracker.set_budget(SESSION, "1.00")


async def report(url: str) -> None:
    """Print what each process spent, and the total."""
    async with connect_budget(url) as tracker:
        status = await tracker.status(SESSION)
        for child in status.children:
            print(f"{child.scope.rpartition(':')[2]:>4}: ${child.spent_micro_usd / 1e6:.2f}")
        print(f"spent:    ${await tracker.get_spent(SESSION):.2f} of $1.00")
        print(f"reserved: ${status.reserved_micro_usd / 1e6:.2f}")


def main(url: str) -> None:
    """Set the budget, let all processes spend, and look at the ledger."""
    asyncio.run(set_budget(url))
    workers = [
        multiprocessing.get_context("spawn").Process(target=process, args=(url, number))
        for number in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    asyncio.run(report(url))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"sqlite:///{folder}/budget.db")
