"""Values of the environment that commands and endpoints send back: none of it becomes an error."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from executors.orders import failure_of, opened, order
from headgate.executors.command import TAIL_BYTES
from headgate.executors.targets import CommandTarget
from headgate.executors.templates import Environment

PATH = {"PATH": os.environ["PATH"]}
SECRET = 'TOPsec\\"q/ret%é 1234567890abcdefgh'
ESCAPE = re.compile("%..")
PIECES = ("TOPs", "psec", "ret%", "67890", "efgh")

FORMS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "JSON": json.dumps,
    "JSON in UTF-8": lambda text: json.dumps(text, ensure_ascii=False),
    "JSON with escaped slashes": lambda text: json.dumps(text).replace("/", "\\/"),
    "in a path": quote,
    "in a query": lambda text: quote(text, safe=""),
    "in a form": quote_plus,
    "with small letters": lambda text: ESCAPE.sub(lambda found: found[0].lower(), quote(text)),
    "by Python": repr,
    "as bytes by Python": lambda text: repr(text.encode()),
}


def environment(value: str = SECRET) -> Environment:
    found = Environment({"KEY": value})
    found.value("KEY", setting="x")
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_value_is_taken_out_however_it_is_written(form: str) -> None:
    cleaned = environment().cleaned(f"bad: {FORMS[form](SECRET)}!")
    assert not any(piece in cleaned for piece in PIECES), cleaned
    assert "{env.KEY}" in cleaned


@pytest.mark.parametrize("form", FORMS)
def test_the_end_of_a_text_begins_at_no_part_of_a_value(form: str) -> None:
    hidden = environment()
    written = FORMS[form](SECRET)
    for behind in range(len(written.encode()) + 2):
        raw = f"x{written}{'y' * behind}".encode()
        end = hidden.cleaned_end(raw, length=20)
        assert not any(piece in end for piece in PIECES), (behind, end)
        assert end.endswith("y" * min(behind, 20))


def test_the_end_of_a_text_of_long_characters_begins_at_no_part_of_a_value() -> None:
    hidden = environment()
    raw = f"{SECRET}{'漢' * 6}".encode()
    whole = raw[-20 - hidden.longest_bytes :]
    assert hidden.cleaned_end(whole, length=20) == "{env.KEY}漢漢漢漢漢漢"
    assert hidden.cleaned_end(raw[-20 - 10 :], length=18) == "漢漢漢漢漢漢"


def test_a_value_that_is_no_text_is_found_as_it_is_read_back() -> None:
    raw = b"no \xfftext \xfe"
    hidden = environment(raw.decode(errors="surrogateescape"))
    assert hidden.cleaned_end(b"bad: " + raw, length=6) == "{env.KEY}"
    assert hidden.cleaned(f"bad: {raw.decode(errors='replace')}") == "bad: {env.KEY}"


@pytest.mark.parametrize("behind", [0, 30, TAIL_BYTES - 40, TAIL_BYTES - 18, TAIL_BYTES, 300_000])
async def test_the_error_of_a_command_has_no_part_of_a_value(behind: int) -> None:
    words = f"'x' * 5000 + os.environ['A'] + 'y' * {behind}"
    code = f"import os, sys; sys.stderr.write({words}); exit(1)"
    target = CommandTarget(command=(sys.executable, "-c", code), env={"A": "{env.KEY}"})
    async with opened(target, environ=PATH | {"KEY": SECRET}) as executor:
        error = failure_of(await executor.execute(order())).error
    assert not any(piece in error for piece in PIECES), error


async def test_a_value_of_several_lines_is_taken_out_whole() -> None:
    code = "import os, sys; print(os.environ['A'], file=sys.stderr); exit(1)"
    target = CommandTarget(command=(sys.executable, "-c", code), env={"A": "{env.KEY}"})
    value = "-----BEGIN-----\n" + "line of a key\n" * 400 + "-----END-----"
    async with opened(target, environ=PATH | {"KEY": value}) as executor:
        error = failure_of(await executor.execute(order())).error
    assert error == "command exited with 1: {env.KEY}"
