"""Which ledger a command asks: the options that say so, and the default when none does.

Rules: two options that contradict each other are refused, never ranked; and a command that only
reads founds no books, since a path with a mistake in it would show that nothing was spent.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from headgate.cli.places.data_directory import data_directory
from headgate.errors import InvalidSettingError, LedgerUnavailableError
from headgate.ledgers.schemes import EXAMPLES, SCHEMES, URL_VARIABLE, scheme_of

if TYPE_CHECKING:
    from headgate.tracker import LedgerTracker

Result = TypeVar("Result")

ANSWER_SECONDS = 30.0
NOTHING = ""
"""What names the ledger that is asked when nobody names one."""

_OPTIONS = (
    click.option("--tracker", type=click.Choice(list(SCHEMES)), help="What keeps the books."),
    click.option("--url", help=f"Where the books are.  [default: {URL_VARIABLE}, else SQLite]"),
    click.option("--redis-url", help="The same, for Redis or Valkey."),
    click.option("--postgres-url", help="The same, for PostgreSQL."),
    click.option("--sqlite-path", help="The same, for an SQLite file."),
)


class Place:
    """The options of a command that say where the books are."""

    def __init__(
        self,
        tracker: str | None,
        url: str | None,
        redis_url: str | None,
        postgres_url: str | None,
        sqlite_path: str | None,
    ) -> None:
        self.tracker = tracker
        sqlite_url = f"sqlite:///{sqlite_path}" if sqlite_path else sqlite_path
        self.urls = {
            "--url": url,
            "--redis-url": redis_url,
            "--postgres-url": postgres_url,
            "--sqlite-path": sqlite_url,
        }

    def url(self, *, founds: bool) -> str:
        """Return the URL of the ledger, or say what is wrong with the options.

        Unless it may be founded, a file has to be there.
        """
        option, url = self._named()
        self._check(option, url)
        if not founds and scheme_of(url) in SCHEMES["sqlite"]:
            _check_file(option, url)
        return url

    def _named(self) -> tuple[str, str]:
        """Return the URL, and what names it: an option, the environment, or nothing."""
        given = {option: url for option, url in self.urls.items() if url is not None}
        if len(given) > 1:
            raise InvalidSettingError(" and ".join(given), "name one ledger; leave out the others")
        if not given:
            return self._default()
        option, url = next(iter(given.items()))
        if not url.strip():
            # An unset variable of a script, most likely; the default would be another ledger.
            raise InvalidSettingError(option, "is empty; name a ledger, or leave the option out")
        return option, url

    def _default(self) -> tuple[str, str]:
        named = os.environ.get(URL_VARIABLE, "")
        if named and (self.tracker is None or scheme_of(named) in SCHEMES[self.tracker]):
            return URL_VARIABLE, named
        if self.tracker == "local":
            return NOTHING, "memory:"
        if self.tracker in (None, "sqlite"):
            return NOTHING, f"sqlite:///{data_directory() / 'budget.db'}"
        raise InvalidSettingError("--tracker", f"{self.tracker} needs --{self.tracker}-url")

    def _check(self, option: str, url: str) -> None:
        scheme = scheme_of(url)
        if scheme in SCHEMES["local"]:
            problem = "a local budget lives in the memory of one process, so a command has nothing"
            advice = "to see or to set; use sqlite, redis or postgres"
            raise InvalidSettingError("--tracker", f"{problem} {advice}")
        kind = option.removeprefix("--").partition("-")[0]
        if kind in EXAMPLES and scheme not in SCHEMES[kind]:
            advice = f"write one as {EXAMPLES[kind]}"
            raise InvalidSettingError(option, f"{scheme[:20]!r} is not a URL of {kind}; {advice}")
        if self.tracker is not None and scheme not in SCHEMES[self.tracker]:
            problem = f"{scheme[:20]!r} is not a URL of {self.tracker}"
            raise InvalidSettingError(option, f"{problem}; give one, or leave out --tracker")


def with_place(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give a command the options that name a ledger, as one argument `place`."""

    def run(
        *,
        tracker: str | None,
        url: str | None,
        redis_url: str | None,
        postgres_url: str | None,
        sqlite_path: str | None,
        **others: object,
    ) -> Result:
        place = Place(tracker, url, redis_url, postgres_url, sqlite_path)
        return command(place=place, **others)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    decorated: Callable[..., Result] = run
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def ask(
    place: Place,
    question: Callable[[LedgerTracker], Awaitable[Result]],
    *,
    founds: bool = False,
) -> Result:
    """Open the ledger, ask it one question, and close it; `founds` makes one where none is."""
    import asyncio  # noqa: PLC0415  slow to load, and not needed to print a command's help

    from headgate.ledgers.connect import connect_budget  # noqa: PLC0415

    tracker = connect_budget(place.url(founds=founds))

    async def answered() -> Result:
        try:
            async with asyncio.timeout(ANSWER_SECONDS), tracker:
                return await question(tracker)
        except TimeoutError:
            problem = f"the ledger did not answer within {ANSWER_SECONDS:g} seconds"
            raise LedgerUnavailableError(problem) from None

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        answer = _apart(lambda: asyncio.run(answered()))
    for warning in caught:
        click.echo(f"headgate: warning: {warning.message}", err=True)
    return answer


def _apart(work: Callable[[], Result]) -> Result:
    """Run in a thread that the process need not wait for: Ctrl-C ends it though a ledger hangs."""
    from concurrent.futures import Future  # noqa: PLC0415  as slow as asyncio, which brings it
    from threading import Thread  # noqa: PLC0415

    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001  whatever it is, the caller raises it
            answer.set_exception(error)

    Thread(target=run, name="headgate-budget", daemon=True).start()
    return answer.result()


def _check_file(option: str, url: str) -> None:
    from headgate.ledgers.connect import sqlite_path  # noqa: PLC0415  slow to load, as asyncio

    path = sqlite_path(url)
    try:
        path.stat()
    except FileNotFoundError:
        _refuse_to_found(option, path)
    except OSError:
        # Whatever else is wrong with the path, the ledger has the words for it.
        return


def _refuse_to_found(option: str, path: Path) -> None:
    problem = f"there are no books at {path}; headgate budget set founds them"
    if option != NOTHING:
        raise InvalidSettingError(option, problem)
    line = f"no budget was set yet: {problem}"
    raise LedgerUnavailableError(line)
