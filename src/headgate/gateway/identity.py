"""Who sends a request to the gateway: which project, agent and budgets, how urgent, which session.

The bounds of a token come first, then the path prefix `/p/<project>/<agent>/v1/...`, then the
headers `X-Headgate-Project`, `-Agent`, `-Scope` and `-Priority`; otherwise it is the project
`default` and an agent named after the client. Names are checked as those of tasks are.

Rule: a text that begins as a token of Headgate is one, good or not, and is nobody else's key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple, NoReturn
from urllib.parse import unquote

import msgspec

from headgate.api.callers import own
from headgate.api.errors import ApiError
from headgate.api.submission import (
    excerpt,
    parse_agent_id,
    parse_identifier,
    parse_priority,
    parse_scopes,
)
from headgate.config.settings import DEFAULT_PROJECT
from headgate.core.budgets.scopes import MAX_REMEMBERED_LENGTH, Scope
from headgate.core.estimates import Reserve
from headgate.errors import InvalidTaskError
from headgate.storage.tokens import UNBOUND, Bounds

MAX_REMEMBERED = 1_024
"""So many senders are remembered, unless what they say of themselves is very long."""

MAX_NAMED = 10
"""So many projects are named to somebody who named one that is not there."""

FALLBACK_CLIENT = "api"
_PREFIX = "/p/"
_NO_AGENTS = ("v1", "api", "upstreams")
_CLIENTS = [
    (re.compile(pattern, re.IGNORECASE), client)
    for pattern, client in (
        (r"claude-cli/|claude-code/", "claude-code"),
        (r"codex[_-](?:cli_rs|exec|tui|vscode|mcp|sdk)|codex/", "codex"),
        (r"opencode/", "opencode"),
        (r"aider/", "aider"),
        (r"langchain", "langchain"),
        (r"litellm", "litellm"),
        (r"(?:async)?openai/python", "openai-python"),
        (r"(?:async)?anthropic/python", "anthropic-python"),
        (r"openai/js", "openai-node"),
        (r"anthropic/js", "anthropic-node"),
        (r"ai-sdk|ai/[0-9]", "ai-sdk"),
        (r"curl/", "curl"),
    )
]
_MAX_AGENT_BYTES = 512
_IDENTITY_HEADERS = (
    *(b"user-agent", b"originator", b"x-headgate-project", b"x-headgate-agent"),
    *(b"x-headgate-scope", b"x-headgate-priority", b"x-headgate-reserve"),
)
_SESSION_HEADERS = ("x-claude-code-session-id", "session-id", "session_id")
_AFFINITY_HEADERS = ("x-session-affinity", "x-session-id", "conversation_id")
_CONVERSATION_HEADERS = frozenset(name.encode() for name in (*_SESSION_HEADERS, *_AFFINITY_HEADERS))
_SESSION_BYTES = 8
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_KEY = re.compile(r"[!-~]{1,4096}")
_TOKEN = re.compile(r"\W*hg_", re.IGNORECASE)
_TOKEN_INSIDE = re.compile(r"hg_[0-9a-f]{12}_", re.IGNORECASE)


class Path(NamedTuple):
    """A path without its prefix, and whom the prefix names."""

    project_id: str | None
    agent_id: str | None
    rest: str


def split_prefix(path: str) -> Path:
    """Split `/p/<project>/<agent>/v1/...`, where the agent may be missing; the path is not decoded.

    What stands there is not checked yet, except that it can be decoded.
    """
    if not path.startswith(_PREFIX):
        return Path(None, None, path)
    project, slash, rest = path.removeprefix(_PREFIX).partition("/")
    agent, more, after = rest.partition("/")
    if not agent or agent in _NO_AGENTS:
        return Path(_decoded(project), None, slash + rest or "/")
    return Path(_decoded(project), _decoded(agent), more + after or "/")


def _decoded(part: str) -> str:
    try:
        return unquote(part, errors="strict")
    except UnicodeDecodeError:
        raise ApiError("not_found", "the path cannot be decoded") from None


class RequestHeaders:
    """The headers of a request, whose names are in lower case; of a repeated one, the first."""

    def __init__(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._values = dict(reversed(headers))
        self.names_conversation = self.has_any(_CONVERSATION_HEADERS)
        """Whether one of them says which conversation the request belongs to."""

    def raw(self, name: bytes) -> bytes:
        """Return a value as it came; empty where there is none."""
        return self._values.get(name, b"")

    def get(self, name: str) -> str:
        """Return a value; empty where there is none."""
        value = self._values.get(name.encode("latin-1"))
        return "" if value is None else value.decode("latin-1").strip()

    def has_any(self, names: frozenset[bytes]) -> bool:
        """Tell whether there is a header of any of these names."""
        return not self._values.keys().isdisjoint(names)

    def first_of(self, names: Iterable[str]) -> str:
        """Return the value of the first of these headers that has one; empty if none has."""
        for name in names:
            if text := self.get(name):
                return text
        return ""

    def identity(self) -> tuple[bytes, ...]:
        """Return all that says who sends the request, beside its path and its keys."""
        values = self._values
        return tuple([values.get(name, b"") for name in _IDENTITY_HEADERS])


class ClientKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What a client sends to be let in: a token of Headgate, a key of a provider, or both.

    `scheme` says how the key came, and so how it goes on: `bearer` or `x-api-key`.
    """

    token: str = ""
    provider_key: str = ""
    scheme: str = "bearer"

    def __repr__(self) -> str:
        has = ", ".join(name for name in ("token", "provider_key") if getattr(self, name))
        return f"ClientKeys({has})"


NO_KEYS = ClientKeys()
_KEY_HEADERS = frozenset((b"authorization", b"x-api-key"))


def keys_of(headers: RequestHeaders) -> ClientKeys:
    """Return the keys of a request, from `Authorization: Bearer` and `x-api-key`."""
    if not headers.has_any(_KEY_HEADERS):
        return NO_KEYS
    return read_keys(headers.raw(b"authorization"), headers.raw(b"x-api-key"))


def read_keys(authorization: bytes, api_key: bytes) -> ClientKeys:
    """Return the keys that stand in the two headers."""
    kind, _, bearer = authorization.decode("latin-1").strip().partition(" ")
    given = {
        "bearer": bearer.strip() if kind.lower() == "bearer" else "",
        "x-api-key": api_key.decode("latin-1").strip(),
    }
    token = key = ""
    scheme = "bearer"
    for name, text in given.items():
        if not text:
            continue
        if is_headgate_token(text):
            token = token or text
        elif not key and _KEY.fullmatch(text):
            key, scheme = text, name
    return ClientKeys(token=token, provider_key=key, scheme=scheme)


def is_headgate_token(text: str) -> bool:
    """Tell whether a key is a token of Headgate, good or not: it never goes upstream."""
    return _TOKEN.match(text) is not None or _TOKEN_INSIDE.search(text) is not None


def client_of(headers: RequestHeaders) -> str:
    """Return the client that sends a request, as it is known to people."""
    for name in ("user-agent", "originator"):
        text = headers.get(name)[:_MAX_AGENT_BYTES]
        for pattern, client in _CLIENTS:
            if text and pattern.search(text):
                return client
    return FALLBACK_CLIENT


def session_of(headers: RequestHeaders, *, cache_key: str = "", prefix_hash: str = "") -> str:
    """Return a short hash of the conversation that a request belongs to; empty if nobody says.

    It is what the client calls its session, or the key of its cache; otherwise what conversations
    with the same system prompt and tools have in common.
    """
    is_named = headers.names_conversation
    kind, text = "session", headers.first_of(_SESSION_HEADERS) if is_named else ""
    if not text:
        kind, text = "cache", cache_key
    if not text and is_named:
        kind, text = "affinity", headers.first_of(_AFFINITY_HEADERS)
    if not text:
        kind, text = "prefix", prefix_hash
    if not text:
        return ""
    said = f"{kind}:{text}".encode(errors="replace")
    return blake2b(said, digest_size=_SESSION_BYTES).hexdigest()


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends a request; its project's own budget is the first of its scopes."""

    project_id: str
    agent_id: str
    scopes: tuple[str, ...]
    priority: int
    client: str
    reserve: Reserve | None = None


class Identities:
    """Who sends requests, remembered by all that says so; forget it with other settings."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Identity] = {}

    def forget(self) -> None:
        """Read everybody anew."""
        self._known.clear()

    def get(
        self,
        path: Path,
        headers: RequestHeaders,
        *,
        bounds: Bounds,
        knows_project: Callable[[str], bool],
        project_names: Callable[[], Sequence[str]] = tuple,
    ) -> Identity:
        """Return who sends a request, or refuse it with `ApiError`."""
        said = headers.identity()
        # A hash of no bounds is made anew each time, and most have none.
        key = (path.project_id, path.agent_id, None if bounds is UNBOUND else bounds, *said)
        known = self._known.get(key)
        if known is not None:
            return known
        found = identify(
            path, headers, bounds=bounds, knows_project=knows_project, project_names=project_names
        )
        if sum(map(len, said)) <= MAX_REMEMBERED_LENGTH:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            self._known[key] = found
        return found


def identify(
    path: Path,
    headers: RequestHeaders,
    *,
    bounds: Bounds,
    knows_project: Callable[[str], bool],
    project_names: Callable[[], Sequence[str]] = tuple,
) -> Identity:
    """Return who sends a request, or refuse it with `ApiError`.

    What contradicts the bounds of its token is forbidden; what the token leaves open is the path's
    to say, then the headers'. A refusal names what its sender wrote, and not a field of a body.
    """
    try:
        return _identity(path, headers, bounds, knows_project, project_names)
    except InvalidTaskError as error:
        line = _placed(str(error), error.field, path)
        raise ApiError(error.code, line, details={"field": error.field}) from None
    except ApiError as error:
        details = error.body.details or {}
        line = _placed(error.body.error, str(details.get("field", "")), path)
        raise ApiError(error.body.code, line, details=details) from None


def _placed(line: str, field: str, path: Path) -> str:
    """Return a refusal that says where the sender has written what is wrong."""
    places = {
        "projectId": "header X-Headgate-Project",
        "agentId": "header X-Headgate-Agent",
        "scopes": "header X-Headgate-Scope",
        "priority": "header X-Headgate-Priority",
        "reserve": "header X-Headgate-Reserve",
    }
    if path.project_id is not None:
        places["projectId"] = f"path prefix /p/{excerpt(path.project_id)}"
    if path.agent_id is not None:
        prefix = f"/p/{excerpt(path.project_id or '')}/{excerpt(path.agent_id)}"
        places["agentId"] = f"path prefix {prefix}"
    where = places.get(field)
    return line if where is None else line.replace(f"field '{field}'", where)


def _no_project(project_id: str, names: Sequence[str], bounds: Bounds) -> ApiError:
    line = f"field 'projectId': there is no project '{excerpt(project_id)}'"
    if names and not bounds.is_bound:
        listed = ", ".join(excerpt(one) for one in names[:MAX_NAMED])
        further = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        line += f"; there are: {listed}{further}. Add [projects.NAME] to the settings for another"
    return ApiError("unknown_project", line, details={"field": "projectId"})


def _identity(
    path: Path,
    headers: RequestHeaders,
    bounds: Bounds,
    knows_project: Callable[[str], bool],
    project_names: Callable[[], Sequence[str]],
) -> Identity:
    client = client_of(headers)
    project_id = path.project_id or headers.get("x-headgate-project") or None
    agent_id = path.agent_id or headers.get("x-headgate-agent") or None
    if path.project_id == "":
        _reject("projectId", "must not be empty")
    if project_id is not None:
        parse_identifier(project_id, "projectId")
    if agent_id is not None:
        parse_agent_id(agent_id)
    project_id = own("projectId", project_id, bounds.project_id) or DEFAULT_PROJECT
    agent_id = own("agentId", agent_id, bounds.agent_id) or client
    if not knows_project(project_id):
        raise _no_project(project_id, project_names(), bounds)
    named = [part.strip() for part in headers.get("x-headgate-scope").split(",")]
    scopes = parse_scopes([one for one in named if one], Scope(f"project:{project_id}"), bounds)
    priority = _priority(headers.get("x-headgate-priority"), bounds.least_priority)
    return Identity(
        project_id=project_id,
        agent_id=agent_id,
        scopes=scopes,
        priority=priority,
        client=client,
        reserve=_reserve(headers.get("x-headgate-reserve")),
    )


def _priority(text: str, least: int | None) -> int:
    if not text:
        return 0 if least is None else max(0, least)
    if not _INTEGER.fullmatch(text):
        _reject("priority", "must be a whole number; lower goes first")
    priority = parse_priority(int(text))
    if least is not None and priority < least:
        line = f"field 'priority': the token is for {least} and higher; lower goes first"
        raise ApiError("forbidden", line, details={"field": "priority"})
    return priority


def _reserve(text: str) -> Reserve | None:
    if not text:
        return None
    try:
        return Reserve(text.lower())
    except ValueError:
        _reject("reserve", "must be strict or expected")


def _reject(field: str, problem: str) -> NoReturn:
    raise ApiError("invalid_field", f"field '{field}': {problem}", details={"field": field})
