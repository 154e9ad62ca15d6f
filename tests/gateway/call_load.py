"""Calls of random shapes from many clients, and the books held against the bill of the provider.

Every call has a mark: in its prompt, so that the bill has it, and as the name of its agent, so that
the books have it. Whatever a client, the gateway or the provider did, the two are compared mark by
mark.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx2
import msgspec

from gateway.billing_upstream import BillingUpstream, Charge, Fault, Plan, Request, plan_of_prompt

PATHS = {
    "/v1/chat/completions": "gpt-5",
    "/v1/completions": "gpt-5-mini",
    "/v1/responses": "gpt-5",
    "/v1/embeddings": "text-embedding-3-small",
    "/v1/messages": "claude-sonnet-5",
}
PROJECTS = ("strict", "expected", "open")
MAX_WORDS = 60
MAX_TOKENS = 200
LONG_PROMPT = "remember this " * 600
RETRIES = 3
FAULTS: tuple[Fault, ...] = ("cut", "drop", "garbage", "no-usage", "error-event", "wrong-type")
STATUSES = (500, 502, 503, 529, 408, 400)
PRICES = """
[prices."*"]
input = 2.0
output = 8.0
cached_input = 0.5
cache_write = 2.5
"""
_PROMPT = "[[mark {mark}]] [[words {words}]]"


def faults(seed: int, ratio: float) -> Any:
    """Return what decides which requests go wrong, and how; the same seed, the same faults."""
    chosen = random.Random(seed)

    def decide(request: Request) -> Plan | None:
        if chosen.random() >= ratio:
            return None
        plan = plan_of_prompt(request)
        kind = chosen.random()
        if kind < 0.01:
            return msgspec.structs.replace(plan, status=429, retry_after="1")
        if kind < 0.4:
            return msgspec.structs.replace(plan, status=chosen.choice(STATUSES))
        after = chosen.randrange(0, 12)
        fault = chosen.choice(FAULTS)
        # A connection that had been idle and is closed at once was closed before the request came,
        # which is sent again; whoever did some work for it takes longer to fail.
        is_slow = fault == "drop" and chosen.random() < 0.5
        return msgspec.structs.replace(
            plan,
            fault=fault,
            after_events=after,
            delay_seconds=0.5 if is_slow else 0.0,
            is_charged=fault != "drop" or is_slow,
        )

    return decide


class CallClient:
    """One client, which makes one call after the other and behaves badly now and then."""

    def __init__(self, url: str, seed: int, *, tight: str = "", pause_seconds: float = 0) -> None:
        """`tight` is the end of a scope that some calls charge as well; `pause_seconds` after one
        that failed.
        """
        self._random = random.Random(seed)
        self._seed = seed
        self._tight = tight
        self._url = url
        self._pause_seconds = pause_seconds
        self.statuses: Counter[int] = Counter()
        self.made = 0
        self.left = 0

    async def run(self, calls: int) -> None:
        """Make so many calls."""
        limits = httpx2.Limits(max_connections=4, max_keepalive_connections=2)
        async with httpx2.AsyncClient(base_url=self._url, timeout=60.0, limits=limits) as client:
            for number in range(calls):
                await self._call(client, number)

    async def _call(self, client: httpx2.AsyncClient, number: int) -> None:
        path = self._random.choice(list(PATHS))
        project = self._random.choice(PROJECTS)
        mark = f"m-{self._seed}-{number}-{project}"
        body = self._body(path, mark)
        headers = {"x-headgate-agent": mark, "user-agent": f"client-{self._seed}"}
        if self._random.random() < 0.5:
            headers["x-session-id"] = f"session-{self._seed}"
        if self._tight and self._random.random() < 0.2:
            headers["x-headgate-scope"] = f"project:{project}/{self._tight}"
        self.made += 1
        leaves_after = self._random.uniform(0.0, 0.05) if self._random.random() < 0.1 else None
        for _ in range(RETRIES):
            try:
                async with asyncio.timeout(leaves_after):
                    status = await self._once(client, f"/p/{project}{path}", body, headers)
            except TimeoutError:
                self.left += 1
                # Some come back with the same body, as clients do after a timeout of theirs.
                if self._random.random() < 0.5:
                    return
                leaves_after = None
                continue
            except httpx2.TransportError:
                status = 0
            self.statuses[status] += 1
            if status < 429:
                return
            await asyncio.sleep(self._pause_seconds)

    async def _once(
        self, client: httpx2.AsyncClient, path: str, body: Any, headers: Mapping[str, str]
    ) -> int:
        leaves_at = self._random.randrange(1, 3_000) if self._random.random() < 0.05 else None
        async with client.stream("POST", path, json=body, headers=dict(headers)) as answer:
            size = 0
            async for piece in answer.aiter_raw():
                size += len(piece)
                if leaves_at is not None and size >= leaves_at:
                    self.left += 1
                    break
            return answer.status_code

    def _body(self, path: str, mark: str) -> dict[str, Any]:
        chosen = self._random
        prompt = _PROMPT.format(mark=mark, words=chosen.randrange(1, MAX_WORDS))
        if chosen.random() < 0.2:
            prompt += f" [[think {chosen.randrange(1, 30)}]]"
        body: dict[str, Any] = {"model": PATHS[path]}
        if chosen.random() < 0.3:
            prompt += " [[pace 0.001]]"
        if path.endswith(("/messages", "/chat/completions")):
            body["messages"] = [{"role": "user", "content": prompt}]
            body["max_tokens"] = chosen.choice((20, MAX_TOKENS))
        elif path.endswith("/completions"):
            body |= {"prompt": prompt, "max_tokens": MAX_TOKENS}
        elif path.endswith("/responses"):
            body |= {"input": prompt, "max_output_tokens": MAX_TOKENS, "store": False}
        else:
            body["input"] = prompt
        if path.endswith("/messages") and chosen.random() < 0.3:
            cached = {"type": "text", "text": LONG_PROMPT, "cache_control": {"type": "ephemeral"}}
            body["system"] = [cached]
        elif path.endswith("/chat/completions") and chosen.random() < 0.3:
            body["messages"].insert(0, {"role": "system", "content": LONG_PROMPT})
        if chosen.random() < 0.5 and not path.endswith("/embeddings"):
            body["stream"] = True
            if "messages" in body and chosen.random() < 0.5 and path.startswith("/v1/chat"):
                body["stream_options"] = {"include_usage": True}
        return body


class Booked(msgspec.Struct, kw_only=True):
    """What the books have of one mark."""

    tokens: int = 0
    assumed: int = 0
    calls: int = 0
    states: set[str] = msgspec.field(default_factory=set)
    project: str = ""


async def books(client: httpx2.AsyncClient) -> dict[str, Booked]:
    """Read all calls that have ended, by their marks."""
    found: dict[str, Booked] = defaultdict(Booked)
    cursor: dict[str, str] = {}
    while True:
        answer = await client.get("/calls", params={"limit": "1000", **cursor})
        assert answer.status_code == 200, answer.text
        page = answer.json()
        for one in page["calls"]:
            booked = found[one["agentId"]]
            usage = one.get("usage") or {}
            booked.tokens += usage.get("tokens", 0)
            booked.assumed += usage.get("assumedTokens", 0)
            booked.calls += 1
            booked.states.add(one["state"])
            booked.project = one["projectId"]
        if not page.get("nextCursor"):
            return found
        cursor = {"cursor": page["nextCursor"]}


class Comparison(msgspec.Struct, kw_only=True):
    """How the books of a run compare with the bill."""

    marks: int = 0
    exact: int = 0
    wrong: list[str] = []
    """Told to the token, and booked otherwise."""

    below: list[str] = []
    """Not told, and booked below what was billed."""

    assumed: int = 0
    billed_tokens: int = 0
    booked_tokens: int = 0


def compare(found: Mapping[str, Booked], bill: Sequence[Charge]) -> Comparison:
    """Hold the books against the bill, mark by mark."""
    result = Comparison(wrong=[], below=[])
    by_mark: dict[str, list[Charge]] = defaultdict(list)
    for charge in bill:
        by_mark[charge.mark].append(charge)
    for mark, charges in by_mark.items():
        booked = found.get(mark, Booked())
        billed = sum(one.tokens for one in charges)
        result.marks += 1
        result.billed_tokens += billed
        result.booked_tokens += booked.tokens
        result.assumed += booked.assumed > 0
        line = f"{mark} ({booked.project}): billed {billed}, booked {booked}: {charges}"
        if all(one.was_told for one in charges) and not booked.assumed:
            if booked.tokens == billed:
                result.exact += 1
            else:
                result.wrong.append(line)
        elif booked.tokens < billed:
            result.below.append(line)
        elif all(one.was_told for one in charges):
            # Something beside what was told may have been billed, as far as anybody knows.
            result.exact += booked.tokens == billed
    for mark in found.keys() - by_mark.keys():
        if found[mark].tokens > found[mark].assumed:
            result.wrong.append(f"{mark}: booked {found[mark]}, and never billed")
    return result


async def settled(client: httpx2.AsyncClient, scopes: Sequence[str], seconds: float) -> Any:
    """Return the status of budgets by scope, when nothing is reserved in any of them."""
    found: dict[str, Any] = {}
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                for scope in scopes:
                    answer = await client.get("/budgets/status", params={"scope": scope})
                    assert answer.status_code == 200, answer.text
                    found[scope] = answer.json()
                if all(
                    float(one["reservedUsd"]) == 0 and not one.get("reservedTokens")
                    for one in found.values()
                ):
                    break
                await asyncio.sleep(0.2)
    return found


async def in_parallel(clients: Sequence[CallClient], calls: int) -> None:
    """Have all clients make so many calls each."""
    async with asyncio.TaskGroup() as group:
        for one in clients:
            group.create_task(one.run(calls))


def price_of(charge: Charge) -> float:
    """Return what a line of the bill costs by `PRICES`, in micro-dollars."""
    plain = charge.input_tokens - charge.cached_tokens - charge.cache_write_tokens
    plain -= charge.cache_write_1h_tokens
    cached = 0.5 * charge.cached_tokens + 2.5 * charge.cache_write_tokens
    return 2.0 * plain + cached + 4.0 * charge.cache_write_1h_tokens + 8.0 * charge.output_tokens


def project_of(charge: Charge) -> str:
    """Return the project whose call a line of the bill is for."""
    return charge.mark.rpartition("-")[2]


def is_quiet(upstream: BillingUpstream) -> bool:
    """Tell whether the provider is busy with nothing."""
    return not any(account.running for account in upstream.accounts.values())
