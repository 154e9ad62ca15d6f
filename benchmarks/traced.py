"""A command of Headgate with every allocation of Python counted; their peak is the last line.

What it needs is loaded first, and only the second half of its time counts: modules and what is
there for a moment while it starts are as large for one step as for many.
"""

from __future__ import annotations

import importlib
import sys
import threading
import tracemalloc

from headgate.cli.main import run

SAMPLE_SECONDS = 0.01


def sample(samples: list[int], ending: threading.Event) -> None:
    while not ending.wait(SAMPLE_SECONDS):
        samples.append(tracemalloc.get_traced_memory()[0])


if __name__ == "__main__":
    # The command loads it when it is called.
    importlib.import_module("headgate.cli.run")
    tracemalloc.start()
    samples, ending = [0], threading.Event()
    sampler = threading.Thread(target=sample, args=(samples, ending))
    sampler.start()
    code = run(sys.argv[1:])
    ending.set()
    sampler.join()
    print(max(samples[len(samples) // 2 :]), file=sys.stderr)
    sys.exit(code)
