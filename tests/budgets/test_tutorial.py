"""The tutorial keeps its promise: twenty processes, one dollar, never a cent more."""

from __future__ import annotations

import re
import subprocess
import sys

from doc_pages import ROOT, blocks_of

PAGE = ROOT / "docs/tutorials/python.md"
EXAMPLE = ROOT / "docs/examples/shared_budget.py"


def run_example(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def cents(text: str) -> int:
    return round(float(text) * 100)


def test_twenty_processes_on_one_dollar_never_spend_more() -> None:
    printed = run_example()
    shares = [cents(share) for share in re.findall(r"^ *w\d+: \$(.+)$", printed, re.MULTILINE)]
    total = re.search(r"^spent: +\$(.+) of \$1.00$", printed, re.MULTILINE)
    assert total is not None
    assert sum(shares) == cents(total[1]) <= 100
    # What the page shows as the end of every run is the end of this one.
    shown = [block.body for block in blocks_of(PAGE.read_text()) if block.language == "text"]
    assert printed.endswith(shown[-1])


def test_the_page_names_the_example_that_it_runs() -> None:
    page = PAGE.read_text()
    assert "](../examples/shared_budget.py)" in page
    assert f"python {EXAMPLE.relative_to(ROOT)}\n" in page
