"""Two tenants on one real service: one who is honest, and one who has every kind of bound token.

The honest one, `theirs`, has tasks, budgets, a worker, a slot and names that nobody was told. The
hostile one has a token for the project `mine`, one for the agent `mallory`, and one for both. After
each attack `World.harms` says what it did to the other.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from gateway.billing_upstream import upstream_in_thread
from headgate.app import STORE_FILE
from headgate.core.call import CallRecord, CallState
from headgate.storage.call_rows import CallStore, EndedCall, first_call_id_at
from headgate.storage.postgres import PostgresTaskStore
from headgate.storage.sql_store import SqlTaskStore
from headgate.storage.sqlite import SqliteTaskStore
from service.fake_providers import fake_provider
from service.support import ServiceProcess, running_service

SETTINGS = """
[auth]
required = true

[scheduler]
max_inflight = 64
worker_lease_seconds = 2

[targets.echo]
kind = "callable"
entry_point = "headgate.executors.callable:echo"
default = true

[projects.mine]
[projects.theirs]

[agents.their-agent]
target = "pull"

[budgets.root]
limit_usd = "1000"
limit_tokens = 100_000_000

[budgets."project:mine"]
limit_usd = "{own_usd}"
limit_tokens = {own_tokens}

[budgets."project:theirs"]
limit_usd = "500"
limit_tokens = 50_000_000

[budgets."project:theirs/agent:mallory"]
limit_usd = "{own_usd}"
limit_tokens = {own_tokens}

[budgets."agent:mallory"]
limit_usd = "{own_usd}"
limit_tokens = {own_tokens}

[upstreams.openai]
kind = "openai"
base_url = "{upstream}/v1"
key_env = "{secret}_KEY"

[upstreams.anthropic]
kind = "anthropic"
base_url = "{upstream}"
key_env = "{secret}_KEY"

[prices."gpt-5"]
input = 1.0
output = 2.0

[prices."claude-sonnet-5"]
input = 1.0
output = 2.0

[prices."text-embedding-3-small"]
input = 1.0
output = 2.0

[[slots]]
name = "common"
provider = "zai"
base_url = "{provider}"
key_file = "{key_file}"

[[slots]]
name = "{secret}-slot"
provider = "zai"
base_url = "{provider}"
key_file = "{key_file}"
projects = ["theirs"]
"""
SECRET = "ostrich"
"""A word that the attacker never sends: whatever answer has it tells something of the other."""

MINE, THEIRS, MALLORY, THEIR_AGENT = "mine", "theirs", "mallory", "their-agent"
OWN_USD, OWN_TOKENS = 1, 1_000_000
"""The limit of each scope of the hostile tenant, so what each of its tokens may spend at most."""

OWN_SCOPES = (
    f"project:{MINE}",
    f"project:{MINE}/agent:{MALLORY}",
    f"project:{THEIRS}/agent:{MALLORY}",
    f"agent:{MALLORY}",
)
PERMISSIONS = ["submit", "read", "cancel"]
BOUNDS: dict[str, dict[str, str]] = {
    "project": {"projectId": MINE},
    "agent": {"agentId": MALLORY},
    "both": {"projectId": MINE, "agentId": MALLORY},
}
"""Every kind of bound token."""

MOST_SECONDS = 0.6
"""How much processor time of the service one request may take; most take a thousandth of it."""

MOST_STORED_BYTES = 96 << 20
PROBE_SECONDS = 15.0
STREAM_SECONDS = 0.1
TICKS = os.sysconf("SC_CLK_TCK")


OWN_CALL, THEIR_CALL = first_call_id_at(time.time() - 60), first_call_id_at(time.time() - 30)
"""The ids of two calls through the gateway that have ended, one of each tenant."""


class Answer(NamedTuple):
    """What came back, and what it has cost the service."""

    status: int
    text: str
    cpu_seconds: float

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.text)


class Tenant:
    """Somebody with a token, on a connection of their own."""

    def __init__(self, service: ServiceProcess, token: str, *, kind: str = "") -> None:
        self.kind = kind
        self.token = token
        self._service = service
        self._connection: http.client.HTTPConnection | None = None

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        is_stream: bool = False,
    ) -> Answer:
        """Send one request; of a stream, return what comes within a moment."""
        started = cpu_seconds(self._service.pids)
        content = body if isinstance(body, bytes) else _encoded(body)
        sent = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            return self._asked(method, path, content, sent | (headers or {}), is_stream, started)
        except (ConnectionError, http.client.HTTPException):
            # The service closes a connection after a request that it could not read.
            self.close()
            return self._asked(method, path, content, sent | (headers or {}), is_stream, started)

    def _asked(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: dict[str, str],
        is_stream: bool,
        started: float,
    ) -> Answer:
        connection = self._connected()
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        if is_stream and response.status == 200:
            text = _first(response, connection)
            self.close()
        else:
            text = response.read().decode(errors="replace")
        return Answer(response.status, text, cpu_seconds(self._service.pids) - started)

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            place = urlsplit(self._service.address).netloc
            self._connection = http.client.HTTPConnection(place, timeout=30.0)
        return self._connection


class World:
    """A service with two tenants, and what the honest one must never feel."""

    def __init__(self, service: ServiceProcess, operator: Tenant) -> None:
        self.service = service
        self.operator = operator
        self._tenants = [operator]
        self.hostile = {kind: self._tenant(kind, bounds) for kind, bounds in BOUNDS.items()}
        self.unbound = self._tenant("unbound", {})
        self.honest = self._tenant(f"{SECRET} token", {"projectId": THEIRS})
        self.their_worker_token = self._tenant(f"{SECRET} worker", {"agentId": THEIR_AGENT})
        self.their_done_task = self.their_waiting_task = self.their_worker = ""
        self.their_response = ""
        self._own_worker: dict[str, str] = {}
        self._before: dict[str, tuple[float, int]] = {}
        self._stored = 0

    def token_with(self, permission: str, bounds: dict[str, str]) -> Tenant:
        """Return a tenant with one permission alone."""
        return self._tenant(permission, bounds, [permission])

    def own_task(self, tenant: Tenant, **fields: object) -> str:
        """Submit a task of the hostile tenant that waits for a far day, and return its id."""
        later = {"action": "wait", "notBefore": "2030-01-01T00:00:00Z"}
        return self._taken_in(tenant, own_task_body(tenant) | later | fields)

    def taken_task(self, tenant: Tenant) -> tuple[str, str, int]:
        """Have a worker of the hostile tenant take a task: its id, the worker's, the attempt.

        Only a token that is bound to no project may work, so others have a task of their own.
        """
        body: dict[str, object] = {"projectId": MINE, "agentId": MALLORY, "target": "pull"}
        if tenant.kind != "agent":
            return self._taken_in(tenant, body | {"action": "pull"}), "no-worker", 1
        # The operator says what it may cost, or a claim of an earlier attack would be held now.
        known = {"action": "pull", "estimate": {"tokens": 1, "usd": "0.000001"}}
        wanted = self._taken_in(self.operator, body | known)
        # An earlier attack may have closed its own agent for a day, which harms nobody else.
        self.operator.ask("POST", "/closures/open", {"kind": "agent", "name": MALLORY})
        place = f"/agents/{MALLORY}/claim"
        for _ in range(20):
            # The same worker as before, or the task would go to one that does not ask any more.
            offer = {"capacity": 100, "waitSeconds": 1} | self._own_worker
            claimed = tenant.ask("POST", place, offer)
            if claimed.status != 200:
                self._own_worker = {}
                continue
            worker_id = claimed.json["workerId"]
            self._own_worker = {"workerId": worker_id}
            for task in claimed.json["tasks"]:
                if task["taskId"] == wanted:
                    return wanted, worker_id, int(task["attempt"])
                # One that an earlier attack has left.
                told = {"workerId": worker_id, "attempt": task["attempt"]}
                tenant.ask("POST", f"/tasks/{task['taskId']}/complete", told)
        why = self.operator.ask("GET", f"/tasks/{wanted}/why").text
        raise AssertionError(f"the task was not handed out: {why}")

    def harms(self) -> list[str]:
        """Say what the honest tenant has lost since this was last asked."""
        found = [*self._spent(), *self._blocked(), *self._filled()]
        self._clear()
        self._before = self._balances()
        return found

    def close(self) -> None:
        """Hang up."""
        for tenant in self._tenants:
            tenant.close()

    def _taken_in(self, tenant: Tenant, body: dict[str, object]) -> str:
        answer = tenant.ask("POST", "/tasks", body)
        if answer.status == 429:
            self._clear()
            answer = tenant.ask("POST", "/tasks", body)
        assert answer.status == 202, answer
        return str(answer.json["taskId"])

    def _clear(self) -> None:
        """Cancel what waits of the attacker and give it its money back.

        Its own limits must not keep the next attack from what it aims at.
        """
        for wish in ({"projectId": MINE}, {"agentId": MALLORY}):
            self.operator.ask("POST", "/tasks/cancel", wish | {"confirm": True, "limit": 1000})
        self.give_back(OWN_SCOPES)

    def give_back(self, scopes: Iterable[str]) -> None:
        """Have the operator undo all that is booked in scopes."""
        for scope in scopes:
            books = self.operator.ask("GET", f"/budgets/status?scope={scope}").json
            usd = Decimal(books["spentUsd"]) + Decimal(books["overrunUsd"])
            tokens = books["spentTokens"] + books["overrunTokens"]
            wish = {"id": uuid.uuid4().hex, "scope": scope, "reason": "the next attack"}
            if usd or tokens:
                back = {"usd": str(-usd), "tokens": -tokens}
                answer = self.operator.ask("POST", "/budgets/adjust", wish | back)
                assert answer.status == 200, answer

    def _tenant(
        self, name: str, bounds: dict[str, str], permissions: list[str] | None = None
    ) -> Tenant:
        wish = {
            "name": f"{name} {secrets.token_hex(4)}",
            "permissions": permissions or PERMISSIONS,
        } | bounds
        answer = self.operator.ask("POST", "/tokens", wish)
        assert answer.status == 201, answer
        tenant = Tenant(self.service, answer.json["token"], kind=name)
        self._tenants.append(tenant)
        return tenant

    def prepare(self) -> None:
        """Give the honest tenant what may be harmed."""
        done = self._submitted(
            action=f"{SECRET} action",
            labels={SECRET: SECRET},
            params={SECRET: SECRET},
            scopes=[f"project:{THEIRS}/session:{SECRET}"],
            agentId=f"{SECRET}-agent",
        )
        self.their_done_task = self._ended(done)
        waiting = {"notBefore": "2030-01-01T00:00:00Z", "params": {SECRET: SECRET}}
        self.their_waiting_task = self._submitted(**waiting, agentId=f"{SECRET}-agent")
        worker = self.their_worker_token.ask(
            "POST", f"/agents/{THEIR_AGENT}/claim", {"capacity": 1}
        )
        assert worker.status == 200, worker
        self.their_worker = str(worker.json["workerId"])
        body = {"id": "their-call", "scope": f"project:{THEIRS}/session:{SECRET}", "usd": "0.25"}
        held = self.honest.ask("POST", "/budgets/reserve", body | {"tokens": 10})
        assert held.status == 200, held
        self.their_response = self._response()
        self._before = self._balances()
        self._stored = self._stored_bytes()

    def _submitted(self, **fields: object) -> str:
        answer = self.honest.ask("POST", "/tasks", {"action": "probe", "agentId": "a"} | fields)
        assert answer.status == 202, answer
        return str(answer.json["taskId"])

    def _ended(self, task_id: str) -> str:
        ends_at = time.monotonic() + PROBE_SECONDS
        while (state := self._task(task_id)["state"]) != "done":
            assert time.monotonic() < ends_at, f"a task of the honest tenant is {state}"
            time.sleep(0.005)
        return task_id

    def _response(self) -> str:
        """Have the honest tenant call a model, and return the id of the stored response."""
        started = time.monotonic()
        answer = self.honest.ask("POST", "/v1/responses", own_call_body("responses"))
        assert answer.status == 200, answer
        assert time.monotonic() - started < PROBE_SECONDS, "a call of the honest tenant waited"
        return str(answer.json["id"])

    def _task(self, task_id: str) -> Any:
        answer = self.honest.ask("GET", f"/tasks/{task_id}")
        assert answer.status == 200, answer
        return answer.json

    def _balances(self) -> dict[str, tuple[float, int]]:
        """Return what is left in the scopes of others, in dollars and in tokens."""
        found = {}
        for scope in ("", f"project:{THEIRS}", f"project:{THEIRS}/session:{SECRET}"):
            stats = self.operator.ask("GET", f"/budgets/status?scope={scope}").json
            used = sum(float(stats[f"{column}Usd"]) for column in ("spent", "reserved", "overrun"))
            tokens = sum(stats[f"{column}Tokens"] for column in ("spent", "reserved", "overrun"))
            found[scope] = (used, tokens)
        return found

    def _spent(self) -> Iterator[str]:
        """Each hostile token may use up the limit of its own scope, and nothing beyond it."""
        tokens_of_probes = 1_000_000
        allowed = {
            "": (3 * OWN_USD, 3 * OWN_TOKENS + tokens_of_probes),
            f"project:{THEIRS}": (OWN_USD, OWN_TOKENS + tokens_of_probes),
        }
        for scope, (usd, tokens) in self._balances().items():
            usd_before, tokens_before = self._before[scope]
            most_usd, most_tokens = allowed.get(scope, (0, 0))
            if usd - usd_before > most_usd + 1e-9:
                yield f"spend: ${usd - usd_before} of '{scope}'"
            if tokens - tokens_before > most_tokens:
                yield f"spend: {tokens - tokens_before} tokens of '{scope}'"

    def _blocked(self) -> Iterator[str]:
        try:
            self._ended(self._submitted())
            self._pulled()
            kept = self.honest.ask("GET", f"/v1/responses/{self.their_response}")
            assert kept.status == 200, f"the stored response is gone: {kept}"
            self.their_response = self._response()
        except AssertionError as error:
            yield f"block: {error}"
        waiting = self._task(self.their_waiting_task)["state"]
        if waiting != "queued":
            yield f"block: the task that waits is {waiting}"
        if self._task(self.their_done_task)["state"] != "done":
            yield "block: a task that was done is no longer"
        for slot in self.operator.ask("GET", "/slots").json["slots"]:
            if not slot["enabled"] or slot.get("closures"):
                yield f"block: the slot {slot['name']} is closed: {slot}"
        for name in (THEIRS, "default"):
            project = self.operator.ask("GET", f"/projects/{name}").json
            if project["status"] != "active":
                yield f"block: the project {name} is {project['status']}"
        for target in self.operator.ask("GET", "/targets").json["targets"]:
            is_open = target["status"] == "active" and not target.get("closures")
            if target["id"] != "pull" and not is_open:
                yield f"block: the target is closed: {target}"

    def _pulled(self) -> None:
        """The honest tenant's own worker gets the honest tenant's own task."""
        task_id = self._submitted(agentId=THEIR_AGENT, target="pull")
        ends_at = time.monotonic() + PROBE_SECONDS
        offer = {"workerId": self.their_worker, "capacity": 1, "waitSeconds": 1}
        while time.monotonic() < ends_at:
            claimed = self.their_worker_token.ask("POST", f"/agents/{THEIR_AGENT}/claim", offer)
            if claimed.status in (404, 410):
                offer.pop("workerId", None)
                continue
            assert claimed.status == 200, claimed
            self.their_worker = offer["workerId"] = claimed.json["workerId"]
            for task in claimed.json["tasks"]:
                report = {"workerId": self.their_worker, "attempt": task["attempt"]}
                done = self.their_worker_token.ask(
                    "POST", f"/tasks/{task['taskId']}/complete", report
                )
                assert done.status == 200, done
                if task["taskId"] == task_id:
                    return
        raise AssertionError("the honest worker did not get its task")

    def _filled(self) -> Iterator[str]:
        grown = self._stored_bytes() - self._stored
        if grown > MOST_STORED_BYTES:
            yield f"fill: {grown >> 20} MiB were stored"

    def _stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.service.folder / "data").glob("*.db*"))


def own_task_body(tenant: Tenant) -> dict[str, object]:
    """Return the least that a task of a hostile token has to say."""
    own: dict[str, dict[str, object]] = {
        "project": {"agentId": MALLORY},
        "agent": {"projectId": MINE},
        "both": {},
    }
    return {"action": "work", **own.get(tenant.kind, {"projectId": MINE, "agentId": MALLORY})}


def own_call_body(protocol: str) -> dict[str, object]:
    """Return a call of a model, as small as it can be."""
    turns = [{"role": "user", "content": "hi"}]
    match protocol:
        case "embeddings":
            return {"model": "text-embedding-3-small", "input": "hi"}
        case "responses":
            return {"model": "gpt-5", "input": "hi", "max_output_tokens": 10}
        case "messages" | "count_tokens":
            return {"model": "claude-sonnet-5", "max_tokens": 10, "messages": turns}
    return {"model": "gpt-5", "max_tokens": 10, "messages": turns, "prompt": "hi"}


def cpu_seconds(pids: list[int]) -> float:
    """Return how much processor time processes have used."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def _encoded(body: object) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


def _first(response: http.client.HTTPResponse, connection: http.client.HTTPConnection) -> str:
    sock = connection.sock
    if sock is None:
        return ""
    sock.settimeout(STREAM_SECONDS)
    pieces: list[bytes] = []
    try:
        while piece := response.read1(65_536):
            pieces.append(piece)
    except TimeoutError:
        pass
    return b"".join(pieces).decode(errors="replace")


async def _make_calls(store: SqlTaskStore) -> None:
    """Write that each tenant has made a call, before the service starts."""
    own = CallRecord(
        id=OWN_CALL,
        project_id=MINE,
        agent_id=MALLORY,
        model="m",
        state=CallState.FAILED,
        created_at=time.time() - 60,
    )
    theirs = msgspec.structs.replace(
        own,
        id=THEIR_CALL,
        project_id=THEIRS,
        agent_id=f"{SECRET}-agent",
        model=f"{SECRET}-model",
        slot=f"{SECRET}-slot",
        error=SECRET,
    )
    await store.open()
    try:
        await CallStore(store).finish([EndedCall(record=one) for one in (own, theirs)])
    finally:
        await store.close()


@contextmanager
def running_world(folder: Path, *arguments: str) -> Iterator[World]:
    """Run a service with two tenants."""
    with fake_provider() as provider, upstream_in_thread() as upstream:
        # Nobody else has a variable of this name, and the services of tests get all there are.
        os.environ[f"{SECRET}_KEY"] = f"sk-{SECRET}"
        key_file = folder / "key"
        key_file.write_text("sk-no-key-of-anybody")
        key_file.chmod(0o600)
        config = folder / "headgate.toml"
        config.write_text(
            SETTINGS.format(
                provider=provider,
                upstream=upstream.url,
                secret=SECRET,
                own_usd=OWN_USD,
                own_tokens=OWN_TOKENS,
                key_file=key_file,
            )
        )
        (folder / "data").mkdir(exist_ok=True)
        if "--store" in arguments:
            url = arguments[arguments.index("--store") + 1]
            asyncio.run(_make_calls(PostgresTaskStore(url)))
        else:
            asyncio.run(_make_calls(SqliteTaskStore(folder / "data" / STORE_FILE)))
        with running_service(folder, "--config", str(config), *arguments) as service:
            token = (folder / "data" / "token").read_text().strip()
            world = World(service, Tenant(service, token, kind="operator"))
            try:
                world.prepare()
                yield world
            finally:
                world.close()
