"""Figures as people read them, on pages and in terminals: short, with the unit that they have.

Rule: one figure reads the same wherever it is shown. What is rounded is for the eye only; nothing
is computed with these texts.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from difflib import get_close_matches
from itertools import accumulate, chain, islice
from typing import TypeVar, cast

import msgspec

from headgate.core.money import MICRO_PER_USD, format_usd, read_usd
from headgate.errors import InvalidSettingError, utc_time

Result = TypeVar("Result")

MINUTE, HOUR, DAY = 60, 3_600, 86_400

_UNITS = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"))
_STEPS = ((10**9, 10**9, "G"), (10**6, 10**6, "M"), (10**4, 10**3, "k"))
_EXACT_BELOW = 10
_CENT = 10_000
_FOUR_DECIMALS_SHOW = 100
_SKEW_SECONDS = 60
"""How far the clocks of two machines may be apart without a word about it."""

_SET_BACK = "before the clock was set back"


def usd(micro_usd: int) -> str:
    """Return an amount in dollars, as exact as it needs to be for a person."""
    return _rounded(micro_usd, four_decimals_below=_CENT)


def column_usd(micro_usd: int) -> str:
    """Return an amount for a column of small ones: below a dollar all have four decimals."""
    return _rounded(micro_usd, four_decimals_below=MICRO_PER_USD)


def _rounded(micro_usd: int, *, four_decimals_below: int) -> str:
    size = abs(micro_usd)
    if size < _FOUR_DECIMALS_SHOW:
        return exact_usd(micro_usd)
    digits = 4 if size < four_decimals_below else 2
    return f"{'-' if micro_usd < 0 else ''}${Decimal(size) / MICRO_PER_USD:,.{digits}f}"


def exact_usd(micro_usd: int) -> str:
    """Return an amount in dollars to the micro-dollar."""
    whole, _, decimals = format_usd(abs(micro_usd))[1:].partition(".")
    return f"{'-' if micro_usd < 0 else ''}${int(whole):,}.{decimals}"


def dollars(text: str | None) -> str:
    """Return an amount that a body of the API has as a text; without one there is none."""
    return "none" if text is None else usd(read_usd(text))


def count(number: float) -> str:
    """Return a number short enough for a table: 12,345 is 12.3k."""
    for least, size, unit in _STEPS:
        if abs(number) >= least:
            return f"{number / size:,.{0 if abs(number) >= 100 * size else 1}f}{unit}"
    is_whole = number == int(number) or abs(round(number, 1)) >= _EXACT_BELOW
    return f"{number:,.0f}" if is_whole else f"{number:,.1f}"


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 1:
        return f"{seconds * 1_000:.0f} ms"
    if seconds < MINUTE:
        return f"{seconds:.1f} s" if seconds < _EXACT_BELOW else f"{seconds:.0f} s"
    left = int(seconds)
    parts = []
    for size, unit in _UNITS:
        if left >= size:
            parts.append(f"{left // size} {unit}")
            left %= size
    if len(parts) == 1 and left and parts[0].endswith("min"):
        parts.append(f"{left} s")
    return " ".join(parts[:2])


def percent(share: float) -> str:
    """Return a share of 1 as a percentage."""
    value = share * 100
    return f"{value:.0f} %" if value >= _EXACT_BELOW or value == 0 else f"{value:.1f} %"


def seconds_of(moment: datetime | float) -> float:
    """Return a time as Unix seconds."""
    return moment.timestamp() if isinstance(moment, datetime) else float(moment)


def iso(moment: datetime | float) -> str:
    """Return a time as programs read it."""
    at = datetime.fromtimestamp(seconds_of(moment), UTC)
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def clock(moment: datetime | float) -> str:
    """Return a time as people read it, in UTC."""
    return utc_time(seconds_of(moment))


def relative(moment: datetime | float, now: float) -> str:
    """Return how long ago a time was, or how long it is until then."""
    away = seconds_of(moment) - now
    if abs(away) < 1:
        return "now"
    return f"in {duration(away)}" if away > 0 else f"{duration(-away)} ago"


def ago(moment: datetime | float, now: float) -> str:
    """Return how long ago something happened; it is never still to come, whatever clocks say."""
    seconds = now - seconds_of(moment)
    if seconds < -_SKEW_SECONDS:
        return _SET_BACK
    return "now" if seconds < 1 else f"{duration(seconds)} ago"


def coming(moment: datetime | float, now: float) -> str:
    """Return how long it is until something that will happen; it is due when its time has come."""
    seconds = seconds_of(moment) - now
    return "due now" if seconds < 1 else f"in {duration(seconds)}"


# JSON pointers (RFC 6901): where in a document something is found.

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_BAD_ESCAPE = re.compile(r"~(?![01])")


def parsed_pointer(pointer: str, *, setting: str) -> tuple[str, ...]:
    """Return the parts of a pointer, or raise `InvalidSettingError` with its setting."""
    if not pointer:
        return ()
    if not pointer.startswith("/") or _BAD_ESCAPE.search(pointer):
        problem = "is not a JSON pointer (RFC 6901); write one as /data/endpoint"
        raise InvalidSettingError(setting, problem)
    parts = pointer[1:].split("/")
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)


def found_at(document: object, path: tuple[str, ...]) -> object:
    """Follow the parts of a JSON pointer, or raise `LookupError`."""
    for part in path:
        if isinstance(document, dict):
            document = document[part]
        elif isinstance(document, list) and _INDEX.fullmatch(part):
            document = document[int(part)]
        else:
            raise LookupError(part)
    return document


# Finding things by a part of their names, whatever its case; no text finds everything.

Thing = TypeVar("Thing")


def named_like(
    things: Iterable[Thing], text: str, names: Callable[[Thing], Sequence[str]]
) -> list[Thing]:
    """Return the things that have a name with this text in it."""
    wanted = text.casefold()
    if not wanted:
        return list(things)
    return [one for one in things if any(wanted in name.casefold() for name in names(one))]


# Names that nobody knows: the known one that is written most alike was probably meant.

NEAR = 0.6
"""How much alike two names must be for a hint, from 0 to 1."""

VERY_NEAR = 0.8
"""The same where names resemble each other anyway, or where a near one has its name refused."""

_COMPARED_CHARACTERS = 100
_COMPARED_NAMES = 1_000


def nearest(name: str, known: Iterable[str], *, cutoff: float = NEAR) -> str:
    """Return the known name that is written most alike, whatever its case; "" if none is near."""
    by_spelling = {
        one[:_COMPARED_CHARACTERS].casefold(): one for one in islice(known, _COMPARED_NAMES)
    }
    wanted = name[:_COMPARED_CHARACTERS].casefold()
    squeezed = _squeezed(wanted)
    for spelling, one in by_spelling.items():
        if squeezed and _squeezed(spelling) == squeezed:
            return one
    close = get_close_matches(wanted, by_spelling, n=1, cutoff=cutoff)
    return by_spelling[close[0]] if close else ""


def _squeezed(name: str) -> str:
    return name.replace("_", "").replace("-", "")


def did_you_mean(near: str, otherwise: str = "") -> str:
    """Ask whether the nearest name was meant; where none is near, say what to do otherwise."""
    return f"did you mean {near}?" if near else otherwise


# JSON that every reader can read: not nested too deeply, in UTF-8, with numbers that have a value.
#
# To decode a megabyte takes up to 400 ms, for lists of lists or for numbers with many digits. So a
# large text is not decoded to be judged. The parser that passes over it finds what is malformed in
# a few milliseconds; the rest is counted here, in slices between which others have their turn.
#
# Rule: a value is judged without recursion, so that judging it cannot fail where reading it would.

SLICE_BYTES = 32 * 1024
"""How much JSON is judged before others have their turn: at most some two milliseconds of work."""

DECODED_BYTES = 8 * 1024
"""Up to this size JSON is decoded to be judged: that takes less than three milliseconds."""

_OPENING = (b"[", b"{")
_NESTED = (dict, list)
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(sorted(set(range(256)).difference(b"[{]}")))
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_LONG_NUMBERS = (b"0" * 309, b"e000")
"""What a number out of range has at least, its digits all zero: 309 of them, or an exponent."""

_MAX_NUMBER_LENGTH = 8 * 1024
"""Longer ones have no value for any reader, whatever their digits are."""

_NUMBERS_A_SLICE = 200
"""How many numbers are read before others have their turn: one such as `1e300` takes 10 µs."""

_IN_NUMBERS = b"0123456789+-.eE"
_NUMBERS = re.compile(rb"-?[0-9][-+.eE0-9]*+")

Steps = Generator[None, None, Result]
"""Work in slices: it yields between them, and returns what came of all."""

SLICE_SECONDS = 0.002
"""How long work holds the loop before others have their turn."""


class DeepJsonError(ValueError):
    """JSON is nested too deeply for some reader."""

    def __init__(self, levels: int) -> None:
        super().__init__(f"is nested deeper than {levels} levels")


async def in_turns(
    steps: Steps[Result],
    turn: Callable[[], Awaitable[None]],
    clock: Callable[[], float],
    slice_seconds: float = SLICE_SECONDS,
) -> Result:
    """Do work to its end, and wait for the next `turn` whenever it has taken a slice of time."""
    try:
        while True:
            began = clock()
            next(steps)
            while clock() - began < slice_seconds:
                next(steps)
            await turn()
    except StopIteration as end:
        return cast("Result", end.value)


def at_once(steps: Steps[Result]) -> Result:
    """Do work to its end, where nobody waits for a turn."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def json_steps(text: bytes, *, levels: int) -> Steps[None]:
    """Judge well-formed JSON; `ValueError` says what some reader could not read."""
    if len(text) <= DECODED_BYTES:
        if is_deeper(text, msgspec.json.decode(text), levels=levels):
            raise DeepJsonError(levels)
        return
    str(text, "utf-8")
    has_long_numbers = _has_long_numbers(text)
    if sum(map(text.count, _OPENING)) <= levels and not has_long_numbers:
        return
    yield
    if b"\\" in text:
        # Without what is escaped, every quote begins or ends a string.
        text = text.replace(b"\\\\", b"")
        yield
        text = text.replace(b'\\"', b"")
        yield
    depth, is_in_string, cut_number = 0, False, b""
    for start in range(0, len(text), SLICE_BYTES):
        parts = text[start : start + SLICE_BYTES].split(b'"')
        outside = b'"'.join(parts[is_in_string::2])
        is_in_string ^= len(parts) % 2 == 0
        changes = memoryview(outside.translate(_BRACKETS, _NO_BRACKETS)).cast("b")
        if max(accumulate(changes, initial=depth)) > levels:
            raise DeepJsonError(levels)
        depth += sum(changes)
        if has_long_numbers:
            outside = cut_number + outside
            whole = outside if is_in_string else outside.rstrip(_IN_NUMBERS)
            cut_number = outside[len(whole) :]
            if len(cut_number) > _MAX_NUMBER_LENGTH:
                raise ValueError("it has a number with too many digits")
            numbers = _NUMBERS.findall(whole)
            for first in range(0, len(numbers), _NUMBERS_A_SLICE):
                some = numbers[first : first + _NUMBERS_A_SLICE]
                msgspec.json.decode(b"[%b]" % b",".join(some))
                yield
        yield
    if cut_number:
        msgspec.json.decode(b"[%b]" % b",".join(_NUMBERS.findall(cut_number)))


def _has_long_numbers(text: bytes) -> bool:
    folded = text.translate(_DIGITS, b"+")
    return any(long in folded for long in _LONG_NUMBERS)


def is_deeper(text: bytes, value: object, *, levels: int) -> bool:
    """Tell whether a value, which was read from this text, is nested deeper than so many levels."""
    # Most texts have fewer brackets than that, which is soon counted.
    return sum(map(text.count, _OPENING)) > levels and _goes_below(value, levels)


def _goes_below(value: object, levels: int) -> bool:
    # Level by level, and in C as far as it goes: a body may have hundreds of thousands of values.
    level: list[object] = [value]
    for _ in range(levels):
        arrays = chain.from_iterable([one for one in level if isinstance(one, list)])
        objects = chain.from_iterable([one.values() for one in level if isinstance(one, dict)])
        level = [one for one in chain(arrays, objects) if isinstance(one, _NESTED)]
        if not level:
            return False
    return True


# Texts that nobody but their reader acts upon: what moves a cursor or turns a line is written
# out.
#
# A name or an error may come from anybody. Shown as it is, a control character could move the
# cursor of a terminal, and a mark of direction could make a line read as another.

_KEPT_IN_LINES = ("\n", "\t")


def printable(text: str) -> str:
    """Return a text as one line, with everything written out that its reader would not see."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def printable_lines(text: str) -> str:
    """Return a text with its lines and tabs, and all else written out as on one line."""
    return "".join(
        one if one.isprintable() or one in _KEPT_IN_LINES else ascii(one)[1:-1] for one in text
    )
