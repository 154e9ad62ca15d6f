"""`headgate slot log`: the files of the data directory, as lines for people and as they are."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import IO, Any

import msgspec
import pytest

from headgate.cli.main import run
from headgate.cli.slot import line_of
from headgate.core.slots.status import LogLine
from service.support import environment

PATIENCE_SECONDS = 20.0


def line(second: int = 0, *, slot: str = "work", day: int = 15, **fields: object) -> dict[str, Any]:
    return {
        "ts": f"2027-01-{day:02}T08:00:{second:02}.000Z",
        "slot": slot,
        "action": "background-quota-poll",
        "phase": "event",
        **fields,
    }


def write(data: Path, day: int, *lines: dict[str, Any]) -> None:
    folder = data / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"slots-2027-01-{day:02}.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in lines)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path, 14, line(1, day=14), line(2, day=14, slot="spare"))
    write(tmp_path, 15, line(3), line(4, slot="spare"), line(5))
    return tmp_path


def seconds(capsys: pytest.CaptureFixture[str], data: Path, *options: str) -> list[int]:
    assert run(["slot", "log", *options, "--json", "--data", str(data)]) == 0
    printed = capsys.readouterr().out.splitlines()
    return [int(json.loads(one)["ts"][17:19]) for one in printed]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ((), [1, 2, 3, 4, 5]),
        (("work",), [1, 3, 5]),
        (("--tail", "2"), [4, 5]),
        (("--day", "2027-01-14"), [1, 2]),
        (("spare", "--day", "2027-01-15"), [4]),
        (("nobody",), []),
    ],
)
def test_lines_are_those_that_were_asked_for_oldest_first(
    options: tuple[str, ...], found: list[int], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert seconds(capsys, data, *options) == found


def test_a_line_is_passed_on_as_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = line(1, phase="response", status=200, flow_id="f1", duration_ms=12.5)
    write(tmp_path, 15, written)
    assert run(["slot", "log", "--json", "--data", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == written


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"phase": "request", "method": "GET", "url": "https://api.example/quota"},
            "request  GET https://api.example/quota",
        ),
        (
            {"phase": "response", "status": 200, "duration_ms": 12.4, "response_body": '{"a":1}'},
            'response  200 in 12 ms {"a":1}',
        ),
        (
            {"phase": "error", "error": "timed out", "duration_ms": 30000.0},
            "error  timed out in 30000 ms",
        ),
        (
            {"details": {"next_poll_minutes": 60, "why": "backing\noff"}},
            "event  next_poll_minutes=60 why=backing off",
        ),
        ({"details": {"text": "x" * 500}}, "event  text=" + "x" * 295 + "…"),
    ],
)
def test_a_line_for_people_says_what_matters_of_its_phase(
    fields: dict[str, object], text: str
) -> None:
    shown = line_of(msgspec.convert(line(1) | fields, LogLine))
    assert shown.partition("  ")[2] == f"work  background-quota-poll  {text}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--day", "yesterday"), "is not a day such as 2027-01-31"),
        (("--follow", "--day", "2027-01-15"), "leave out --day"),
        (("--tail", "0"), "--tail"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: tuple[str, ...], words: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["slot", "log", *options, "--data", str(data)]) == 2
    assert words in capsys.readouterr().err


def test_a_directory_without_a_log_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["slot", "log", "--data", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert f"no such lines in {tmp_path}" in err


def test_following_prints_what_is_added_and_goes_on_with_the_next_day(data: Path) -> None:
    call = ["slot", "log", "work", "-f", "--json", "--tail", "1", "--data", str(data)]
    with subprocess.Popen(
        [sys.executable, "-m", "headgate", *call], stdout=subprocess.PIPE, env=environment()
    ) as process:
        try:
            assert process.stdout is not None
            lines = read_lines(process.stdout)
            assert next(lines) == 5
            write(data, 15, line(6), line(7, slot="spare"))
            assert next(lines) == 6
            write(data, 16, line(8, day=16))
            assert next(lines) == 8
        finally:
            process.kill()


def read_lines(stream: IO[bytes]) -> Iterator[int]:
    """Yield the second of each line as it comes; one that does not come is an error."""
    found: Queue[bytes] = Queue()

    def take() -> None:
        for one in stream:
            found.put(one)

    threading.Thread(target=take, daemon=True).start()
    while True:
        yield int(json.loads(found.get(timeout=PATIENCE_SECONDS))["ts"][17:19])


def test_a_data_directory_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    assert run(["slot", "log", "--data", str(gone)]) == 2
    assert capsys.readouterr().err == (
        f"headgate: --data: {gone} is not a directory; name the service's\n"
    )
