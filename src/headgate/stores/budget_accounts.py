"""The scopes that have a limit, with what they have used, some at a time."""

from __future__ import annotations

from functools import partial

from headgate.core.budgets.accounts import Account
from headgate.databases.access import Access
from headgate.ledgers import sql_books

MOST_READ = 500


class SqlAccounts:
    """Reads the accounts with limits from the books beside the tasks."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def after(self, scope: str | None) -> list[Account]:
        """Return the next accounts behind a scope, from the first on; none at the end."""
        now = self._access.now()
        question = partial(sql_books.limited_accounts, now=now, after=scope, most=MOST_READ)
        return await self._access.ask(question)
