"""Whether a node does its work, and which of its parts does not.

Rule: what a driver says may name hosts and paths, so it goes to the log; whoever asks is told which
part fails, in words of our own.
"""

from __future__ import annotations

import msgspec

OK = "ok"
STORE_FAILS = "the store cannot be asked; the log of this node says why"
LEDGER_FAILS = "the ledger cannot be asked; the log of this node says why"
IS_LOADING = "the tasks are still being read"
DISPATCHER_FAILS = "it failed and is started again; the log of this node says why"
NO_DISPATCHER = "this node knows of none; one is elected within seconds"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine does its work, and what is in the way.

    `parts` has the store, the ledger and the dispatcher, each with its problem or `ok`.
    """

    is_ready: bool
    role: str
    problem: str = ""
    parts: dict[str, str] = {}


def judge(
    *,
    phase: str,
    is_leading: bool,
    is_loaded: bool,
    knows_leader: bool,
    has_fault: bool,
    store_problem: str,
    dispatcher_problem: str,
    ledger_problem: str,
) -> Health:
    """Return the health of a node; `phase` is why it does not work even if all parts do.

    `has_fault` says that the last round of the dispatcher failed in a way that nobody foresaw.
    """
    # The dispatcher uses both. Of the store alone the node tells too, within seconds.
    fails = bool(store_problem or (dispatcher_problem and not ledger_problem))
    parts = {
        "store": STORE_FAILS if fails else OK,
        "ledger": LEDGER_FAILS if ledger_problem else OK,
        "dispatcher": OK,
    }
    if has_fault:
        parts["dispatcher"] = DISPATCHER_FAILS
    elif is_leading and not is_loaded:
        parts["dispatcher"] = IS_LOADING
    elif not is_leading and not knows_leader:
        parts["dispatcher"] = NO_DISPATCHER
    problem = phase or next((words for words in parts.values() if words != OK), "")
    role = "dispatcher" if is_leading else "node"
    return Health(is_ready=not problem, role=role, problem=problem, parts=parts)
