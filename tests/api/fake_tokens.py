"""TokenStore in memory, for tests of the API."""

from __future__ import annotations

import msgspec

from api.asgi_client import Client, Response
from headgate.api.auth import Authenticator, AuthRules
from headgate.storage.audit import AuditEntry
from headgate.storage.tokens import (
    PERMISSIONS,
    UNBOUND,
    Bounds,
    KeptToken,
    Permission,
    Token,
    TokenStore,
    new_token,
)


class FakeTokens(TokenStore):
    """Remembers tokens; `failure`, if set, is raised by every question."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.time = now
        self.kept: dict[str, KeptToken] = {}
        self.failure: Exception | None = None
        self.looked_up = 0
        self.entries: list[AuditEntry] = []

    def now(self) -> float:
        return self.time

    async def create_first(self, kept: KeptToken) -> bool:
        if not self.kept:
            await self.add(kept)
        return list(self.kept) == [kept.token.id]

    async def add(self, kept: KeptToken, entry: AuditEntry | None = None) -> None:
        self.kept[kept.token.id] = kept
        self.entries += [entry] if entry is not None else []

    async def get(self, token_id: str) -> KeptToken | None:
        self.looked_up += 1
        if self.failure is not None:
            raise self.failure
        return self.kept.get(token_id)

    async def list(self) -> list[Token]:
        return [kept.token for kept in self.kept.values()]

    async def revoke(self, token_id: str, entry: AuditEntry | None = None) -> Token | None:
        kept = self.kept.get(token_id)
        if kept is None:
            return None
        self.entries += [entry] if entry is not None else []
        token = msgspec.structs.replace(kept.token, revoked_at=self.time)
        self.kept[token_id] = msgspec.structs.replace(kept, token=token)
        return token


class Door:
    """An application behind an entrance, and a way to have tokens made for it."""

    def __init__(self, **rules: object) -> None:
        self.client = Client()
        self.tokens = FakeTokens()
        api = self.client.app.api
        api.tokens = self.tokens
        api.auth = Authenticator(self.tokens, AuthRules(**rules))  # type: ignore[arg-type]

    def token(
        self,
        *permissions: Permission,
        bounds: Bounds = UNBOUND,
        expires_at: float | None = None,
    ) -> str:
        """Make a token, and return its text."""
        new = new_token(
            name="t",
            permissions=permissions or PERMISSIONS,
            now=self.tokens.time,
            bounds=bounds,
            expires_at=expires_at,
        )
        self.tokens.kept[new.kept.token.id] = new.kept
        return new.text

    def get(self, url: str, token: str | None = None, **headers: str) -> Response:
        return self.client.request("GET", url, headers=_with(token, headers))

    def delete(self, url: str, token: str | None = None) -> Response:
        return self.client.request("DELETE", url, headers=_with(token, {}))

    def post(self, url: str, body: object, token: str | None = None, **headers: str) -> Response:
        return self.client.post(url, body, **_with(token, headers))


def _with(token: str | None, headers: dict[str, str]) -> dict[str, str]:
    return headers if token is None else {"authorization": f"Bearer {token}", **headers}
