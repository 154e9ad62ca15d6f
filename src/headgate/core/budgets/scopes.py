"""Scopes: the tree of budgets, as paths of `kind:name` parts.

`session:eval-1/workflow:w1` lies in `session:eval-1`, which lies in the root, the empty path, whose
budget is the global one. Money held in a scope is held in all its ancestors.

Rule: a `Scope` is always in its one normal form, so equal scopes are equal texts and two spellings
can never be two budgets. A kind is letters, digits, `_` and `-`, and is stored in lower case; a
name is letters, digits and `. _ @ + -`, and keeps its case. All of it is ASCII, without quotes,
spaces, braces, `*`, `?`, `%` or backslashes: such text needs no escaping inside a Redis key (or its
hash tag), an SQL literal or a metrics label, and byte order is the same order everywhere. `_` is a
wildcard in LIKE, so a subtree is selected by range or with `is_within`, not by pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NewType

import msgspec

from headgate.core.text import VERY_NEAR, nearest
from headgate.errors import InvalidScopeError

Scope = NewType("Scope", str)

ROOT = Scope("")
ROOT_NAME = "root"
"""The root in commands, settings and messages. Where it is data, as in JSON, it is the empty text.
"""
ROOT_WORDS = "the whole service"
KINDS = ("project", "agent", "session", "workflow", "team")
"""The kinds that Headgate charges by itself; whoever names scopes may have others."""

MAX_DEPTH = 8
MAX_PART_LENGTH = 128
MAX_SCOPE_LENGTH = 512
MAX_CHARGED_SCOPES = 64
MAX_REMEMBERED_LENGTH = 1_024
"""How long scopes may be together that a cache keeps as its key.

The usual ones have a tenth of that. Those that a client may choose have 32 KiB, and a cache of
thousands of entries would hold hundreds of megabytes of them.
"""

_PART = re.compile(r"([A-Za-z][A-Za-z0-9_-]*):([A-Za-z0-9][A-Za-z0-9._@+-]*)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
_EXAMPLE = "write kind:name parts, as in session:eval-1/workflow:w1"
_SHOWN_CHARACTERS = 60


def parse_scope(text: str, *, field: str = "scope") -> Scope:
    """Check a scope and give its normal form; the empty text is the root."""
    if not isinstance(text, str):
        raise InvalidScopeError(field, f"is a {type(text).__name__}; {_EXAMPLE}")
    if not text:
        return ROOT
    if len(text) > MAX_SCOPE_LENGTH:
        problem = f"has {len(text)} characters, at most {MAX_SCOPE_LENGTH} are kept; shorten it"
        raise InvalidScopeError(field, problem)
    parts = text.split("/")
    if len(parts) > MAX_DEPTH:
        problem = f"is {len(parts)} levels deep, at most {MAX_DEPTH} are kept; leave some out"
        raise InvalidScopeError(field, problem)
    return Scope("/".join([_parse_part(part, field) for part in parts]))


def scope_words(scope: str) -> str:
    """Return a scope as people read it; what is not within anything is the whole service."""
    return scope or ROOT_WORDS


def depth(scope: Scope) -> int:
    """Count the parts: 0 for the root."""
    return scope.count("/") + 1 if scope else 0


def parent(scope: Scope) -> Scope | None:
    """Give the scope one level up; the root has none."""
    return Scope(scope.rpartition("/")[0]) if scope else None


def leaf_kind(scope: Scope) -> str:
    """Give the kind of the last part; empty for the root."""
    return scope.rpartition("/")[2].partition(":")[0]


def leaf_name(scope: Scope) -> str:
    """Give the name of the last part; empty for the root."""
    return scope.rpartition("/")[2].partition(":")[2]


def is_within(scope: Scope, outer: Scope) -> bool:
    """Tell whether money held in `scope` is also held in `outer`; a scope is within itself."""
    return not outer or scope == outer or scope.startswith(f"{outer}/")


def mistyped_kind(scope: str) -> str:
    """Say which kind is nearly one that Headgate charges, and what may be meant; "" if none is."""
    parts = [part.partition(":") for part in scope.split("/")]
    meant = [nearest(kind, KINDS, cutoff=VERY_NEAR) or kind.lower() for kind, _, _ in parts]
    wrong = [part[0] for part, near in zip(parts, meant, strict=True) if part[0].lower() != near]
    if not wrong:
        return ""
    path = "/".join(near + "".join(part[1:]) for part, near in zip(parts, meant, strict=True))
    return f"Headgate itself charges no scope of kind {wrong[0]!r}; did you mean {path}?"


def ancestors(scope: Scope) -> tuple[Scope, ...]:
    """List the scopes that a charge to `scope` reaches: the root first, `scope` itself last."""
    reached = [ROOT]
    slash = scope.find("/")
    while slash >= 0:
        reached.append(Scope(scope[:slash]))
        slash = scope.find("/", slash + 1)
    if scope:
        reached.append(scope)
    return tuple(reached)


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody whose word about money is a claim, and whose own the scopes of some budgets are.

    None is not bound: all of them are its own, the root as well.
    """

    project_id: str | None = None
    agent_id: str | None = None

    @property
    def is_bound(self) -> bool:
        """Whether some budgets, the root at least, are not its own."""
        return self.project_id is not None or self.agent_id is not None

    def may_charge(self, scope: Scope) -> bool:
        """Tell whether a budget is its own. What is above one that is not, is not either.

        That of a project is `project:<id>` with everything within; that of an agent is any scope
        with a part `agent:<id>`.
        """
        own = None if self.project_id is None else Scope(f"project:{self.project_id}")
        if own is not None and not is_within(scope, own):
            return False
        return self.agent_id is None or f"agent:{self.agent_id}" in scope.split("/")


def charged_scopes(scope: Scope, also: Iterable[Scope] = ()) -> tuple[Scope, ...]:
    """List every scope that one reservation holds money in, each once, by depth and then text.

    Whoever locks scopes takes them in this order: a total order shared by all callers cannot
    deadlock. A database that sorts by itself must compare bytes (`COLLATE "C"`).
    """
    reached = set(ancestors(scope))
    for further in also:
        reached.update(ancestors(further))
    if len(reached) > MAX_CHARGED_SCOPES:
        problem = f"one reservation reaches {len(reached)} scopes, at most {MAX_CHARGED_SCOPES}"
        raise InvalidScopeError("also", f"{problem} are held at once; name fewer")
    return tuple(sorted(reached, key=_lock_order))


def _lock_order(scope: Scope) -> tuple[int, str]:
    return depth(scope), scope


def _parse_part(part: str, field: str) -> str:
    match = _PART.fullmatch(part)
    if match is None:
        if len(part) <= _SHOWN_CHARACTERS and _NAME.fullmatch(part):
            problem = f"{part!r} is a name without its kind"
            raise InvalidScopeError(field, f"{problem}; write kind:name, as in project:{part}")
        problem = f"{part[:_SHOWN_CHARACTERS]!r} is not a part; {_EXAMPLE}, with names made of"
        raise InvalidScopeError(field, f"{problem} letters, digits and . _ @ + - only")
    if len(part) > MAX_PART_LENGTH:
        shown = f"{part[:_SHOWN_CHARACTERS]}…"
        problem = f"{shown!r} has {len(part)} characters, a part has at most {MAX_PART_LENGTH}"
        raise InvalidScopeError(field, f"{problem}; shorten the name")
    return f"{match[1].lower()}:{match[2]}"
