"""The workflows in `examples/` run as they are, without a key, and do what their headers say."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from doc_pages import ROOT
from run_commands import EXIT_DONE, EXIT_EXHAUSTED, Commands, Ended

EXAMPLES = ROOT / "examples"
NAMES = ("evaluation", "fan-out", "browser")
MICRO_USD = {"evaluation": 28_800, "fan-out": 0, "browser": 5_000}
"""What each costs: 8 answers of $0.0016 and 8 verdicts of $0.002; nothing; 5 actions of $0.001."""
ESTIMATED_MICRO_USD = {"evaluation": 96_000, "fan-out": 0, "browser": 6_000}


class Example:
    """A fresh copy of one example, and commands beside it."""

    def __init__(self, name: str, folder: Path) -> None:
        shutil.copytree(EXAMPLES / name, folder / name)
        self.file = f"{name}/{name}.yaml"
        self.commands = Commands(folder)

    def run(self, *arguments: str) -> Ended:
        """Run it to its end."""
        return self.commands.run(self.file, *arguments)

    def output(self, step: str) -> Any:
        """Return what a step of the latest run gave."""
        data = ("--data", str(self.commands.data))
        return self.commands.call("runs", "output", "last", step, *data).json

    def rows(self) -> dict[str, Any]:
        """Return the runs of all steps of the latest run by name."""
        data = ("--data", str(self.commands.data))
        shown = self.commands.call("runs", "show", "last", "--all", "--json", *data).json
        return {row["name"]: row for row in shown["rows"]}


@pytest.fixture(params=NAMES)
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Example:
    """Give a fresh copy of each example."""
    return Example(request.param, tmp_path)


def test_every_example_is_run_and_listed() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} == set(NAMES)
    page = (EXAMPLES / "README.md").read_text()
    for name in NAMES:
        assert f"]({name}/{name}.yaml)" in page
        assert f"headgate run examples/{name}/{name}.yaml\n" in page
        header = (EXAMPLES / name / f"{name}.yaml").read_text()
        assert f"#   headgate run examples/{name}/{name}.yaml\n" in header


def test_an_example_runs_to_its_end_and_costs_what_its_file_says(example: Example) -> None:
    done = example.run()
    assert done.code == EXIT_DONE, done.stderr
    report = done.json
    assert report["state"] == "done"
    assert report["workflow"] == Path(example.file).stem
    assert sum(step["micro_usd"] for step in report["steps"]) == MICRO_USD[report["workflow"]]
    assert sum(step["assumed_micro_usd"] for step in report["steps"]) == 0


def test_a_dry_run_of_an_example_tells_what_it_would_cost_and_runs_nothing(
    example: Example,
) -> None:
    dry = example.run("--dry-run")
    assert dry.code == EXIT_DONE, dry.stderr
    assert dry.json["micro_usd"] == ESTIMATED_MICRO_USD[Path(example.file).stem]
    assert example.commands.ids() == []


def test_the_evaluation_judges_every_case_and_reports_once(tmp_path: Path) -> None:
    example = Example("evaluation", tmp_path)
    assert example.run().code == EXIT_DONE
    report = example.output("report")
    wrong = ["Sydney instead of Canberra", "Istanbul instead of Ankara"]
    assert report == {"cases": 8, "right": 6, "wrong": wrong}


def test_an_evaluation_that_has_spent_its_budget_goes_on_with_more(tmp_path: Path) -> None:
    example = Example("evaluation", tmp_path)
    exhausted = example.run("--budget-usd", "0.02")
    assert exhausted.code == EXIT_EXHAUSTED, exhausted.stderr
    spent = sum(step["micro_usd"] for step in exhausted.json["steps"])
    assert 0 < spent <= 20_000
    resumed = example.commands.run("--resume", "last", "--budget-usd", "0.50")
    assert resumed.code == EXIT_DONE, resumed.stderr
    assert sum(step["micro_usd"] for step in resumed.json["steps"]) == MICRO_USD["evaluation"]


def test_the_fan_out_is_joined_in_the_order_of_its_items(tmp_path: Path) -> None:
    example = Example("fan-out", tmp_path)
    assert example.run().code == EXIT_DONE
    joined = example.output("joined")
    assert joined == {
        "words": {"river.txt": 9, "gate.txt": 11, "mill.txt": 3},
        "first_line": "a river carries the mill",
    }
    assert example.rows()["alarm"]["state"] == "skipped"


def test_the_browser_takes_the_way_that_the_price_decides(tmp_path: Path) -> None:
    example = Example("browser", tmp_path)
    assert example.run().code == EXIT_DONE
    assert example.output("price") == {"text": "$34.50", "value": 34.5}
    states = {name: row["state"] for name, row in example.rows().items()}
    assert states.pop("look_elsewhere") == "skipped"
    assert set(states.values()) == {"done"}
