"""The loop that delivers webhooks: claims what is due, sends it, and writes what came of it.

Rule: a slow receiver costs its own messages time. Sends are bounded in all and for each host, and
who has no free permit is passed over when the next ones are chosen; see `WebhookPermits`.
Delivery changes no task, and whatever becomes of it is on disk before it is forgotten here.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import traceback
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple

import msgspec
import structlog

from headgate.core.task import TERMINAL, TaskRecord
from headgate.core.task_view import exact_moment
from headgate.errors import StoreUnavailableError
from headgate.storage.audit import AuditEntry
from headgate.storage.deliveries import (
    ANYWHERE,
    MAX_PURGED,
    PING_EVENT,
    Candidate,
    Choice,
    Deliveries,
    Delivery,
    Message,
    NothingLeft,
    Sender,
    SendReport,
    TryOutcome,
)
from headgate.storage.unit_of_work import MESSAGE_PREFIX, host_of

log = structlog.get_logger("headgate.webhooks")

MAX_SCANNED = 256
CLAIM_SECONDS = 30.0
"""How long a claim lasts beyond the time that a try may take."""

LOOK_SECONDS = 1.0
RETRY_SECONDS = 1.0
SETTLE_TRIES = 5
PURGE_SECONDS = 60.0
PING_SECONDS = 25.0
"""How long a ping takes at most, however long a try may: somebody waits for its answer."""

PROJECT_SHARE = 3
"""A project may have so many times as many permits as are free; what is about no task, any."""

HOSTS_AT_LEAST = 4
"""Among how many hosts the permits are shared, however much there is to send to one of them."""

SLOW_SECONDS = 2.0
"""A try that takes longer is slow, whatever came of it."""

SITE_LABELS = 2
MAX_REMEMBERED = 2_000

WAITS_SECONDS = (5.0, 300.0, 1_800.0, 7_200.0, 18_000.0, 36_000.0, 50_400.0)
"""The wait after each failed try, from the first on."""

MOST_TRIES = len(WAITS_SECONDS) + 1
SPREAD = 0.1
LONGEST_WAIT_SECONDS = WAITS_SECONDS[-1]

_GONE = "the task is not kept any more"
_NONE: Counter[str] = Counter()


class Pace(NamedTuple):
    """How long one try took, and whether the host said anything."""

    seconds: float
    has_answered: bool


class Webhooks:
    """Delivers what this node claims; several nodes share the work."""

    def __init__(
        self,
        deliveries: Deliveries,
        sender: Sender,
        *,
        concurrency: int = 32,
        timeout_seconds: float = 10.0,
        draws: random.Random | None = None,
        is_alone: bool = False,
    ) -> None:
        self.deliveries = deliveries
        self._sender = sender
        self._permits = WebhookPermits(concurrency)
        self._claim_seconds = timeout_seconds + CLAIM_SECONDS
        self._draws = random.Random() if draws is None else draws  # noqa: S311
        self._is_alone = is_alone
        self._name = secrets.token_hex(8)
        self._sending: dict[str, asyncio.Task[Pace | None]] = {}
        self._wake = asyncio.Event()
        self._is_behind = False
        self._purged_at = float("-inf")
        self._problem = ""

    def wake(self) -> None:
        """Read at once what is to be sent."""
        self._wake.set()

    def observe(self, records: Iterable[TaskRecord]) -> None:
        """Wake up if one of these has ended and somebody is to be told."""
        if any(one.terms.callback_url and one.task.status in TERMINAL for one in records):
            self._wake.set()

    async def run(self) -> None:
        """Deliver until cancelled; what is under way then is tried again by the next sender."""
        await self._sender.open()
        try:
            if self._is_alone:
                # Whoever claimed anything before has gone.
                await self._when_possible(None)
            while True:
                started = await self._round()
                await self._pause(started)
        finally:
            await self._end()

    async def run_once(self) -> int:
        """Start to send what is due and has a permit, and return how many that is."""
        self._wake.clear()
        await self._purge()
        if self._permits.free <= 0:
            self._is_behind = True
            return 0
        choice = self._permits.open_to()
        found = await self.deliveries.due(choice, limit=MAX_SCANNED)
        chosen = self._permits.choose(found, self._sending)
        is_all = choice == ANYWHERE and len(chosen) == len(found) < MAX_SCANNED
        self._is_behind = not is_all
        if not chosen:
            return 0
        claim = await self.deliveries.claim(
            [one.id for one in chosen], claimed_by=self._name, seconds=self._claim_seconds
        )
        projects = {one.id: one.project_id for one in chosen}
        for message in claim.messages:
            self._start(message, claim.secrets, projects[message.id])
        return len(claim.messages)

    async def settled(self) -> None:
        """Wait until nothing is under way."""
        while self._sending:
            await asyncio.wait(self._sending.values())

    async def ping(self, url: str) -> SendReport:
        """Send a message that says nothing, now, and report what happened; it is not kept."""
        signing = [secret.secret for secret in await self.deliveries.secrets()]
        now = self.deliveries.now()
        body = msgspec.json.encode({"event": PING_EVENT, "sentAt": exact_moment(now)})
        name = f"{MESSAGE_PREFIX}{PING_EVENT}_{secrets.token_hex(8)}"
        message = Message(id=name, event=PING_EVENT, url=url)
        try:
            async with asyncio.timeout(PING_SECONDS):
                return await self._sender.send(message, body, signing, now=now)
        except TimeoutError:
            return SendReport(error=f"no answer within {PING_SECONDS:g} seconds")

    async def redeliver(
        self, delivery_id: str, entry: AuditEntry | None = None
    ) -> Delivery | NothingLeft | None:
        """Start over with a delivery, at once."""
        answer = await self.deliveries.redeliver(delivery_id, entry)
        self.wake()
        return answer

    def _start(self, message: Message, signing: tuple[str, ...], project_id: str) -> None:
        self._permits.begin(host_of(message.url), project_id)
        task = asyncio.get_running_loop().create_task(self._deliver(message, signing))
        self._sending[message.id] = task
        task.add_done_callback(lambda done: self._ended(message, done, project_id))

    def _ended(self, message: Message, done: asyncio.Task[Pace | None], project_id: str) -> None:
        self._sending.pop(message.id, None)
        self._permits.end(host_of(message.url), _pace(done), project_id)
        if self._is_behind:
            self._wake.set()

    async def _deliver(self, message: Message, signing: tuple[str, ...]) -> Pace | None:
        """Try once, write what came of it, and return how the receiver did."""
        try:
            return await self._try(message, signing)
        except StoreUnavailableError as error:
            _log_unsettled(message, str(error))
        except Exception as error:  # noqa: BLE001 - the edge of a try
            # A fault that nobody foresaw must not leave the message in the air.
            await self._settle_fault(message, error)
        return None

    async def _try(self, message: Message, signing: tuple[str, ...]) -> Pace:
        body = await self.deliveries.body(message)
        started = self.deliveries.now()
        if body is None:
            report = SendReport(error=_GONE, problem=_GONE, is_final=True)
        else:
            report = await self._sender.send(message, body.encode(), signing, now=started)
        seconds = self.deliveries.now() - started
        outcome = self._outcome(message, report, body, seconds=seconds)
        _log_try(message, outcome, problem=report.problem, seconds=seconds)
        await self._settle(outcome)
        return Pace(seconds, report.status is not None)

    async def _settle_fault(self, message: Message, error: Exception) -> None:
        problem = f"could not be sent: {type(error).__name__}"
        # Without the text of the error, which may repeat the address.
        log.error(
            "a webhook could not be sent",
            message_id=message.id,
            problem=problem,
            where=_location_of(error),
        )
        try:
            await self._settle(self._outcome(message, SendReport(error=problem), None))
        except Exception as again:  # noqa: BLE001 - the edge of a try
            _log_unsettled(message, type(again).__name__)

    def _outcome(
        self, message: Message, report: SendReport, body: str | None, *, seconds: float = 0.0
    ) -> TryOutcome:
        due_at = None
        if not report.has_arrived and not report.is_final:
            due_at = next_try_at(
                message.tries + 1,
                now=self.deliveries.now(),
                draw=self._draws.random(),
                asked_seconds=report.asked_seconds,
            )
        return TryOutcome(
            id=message.id,
            claimed_by=self._name,
            has_arrived=report.has_arrived,
            status=report.status,
            error=report.error,
            due_at=due_at,
            body=None if report.has_arrived else body,
            duration_ms=max(0, round(seconds * 1_000)),
            answer=report.answer,
        )

    async def _settle(self, outcome: TryOutcome) -> None:
        for left in reversed(range(SETTLE_TRIES)):
            try:
                await self.deliveries.settle(outcome)
            except StoreUnavailableError:
                if not left:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _round(self) -> int:
        try:
            started = await self.run_once()
        except StoreUnavailableError as error:
            self._complain(str(error))
            return 0
        self._problem = ""
        return started

    async def _pause(self, started: int) -> None:
        """Wait for a call, or for the next read; where more may be due it is read at once."""
        if started and self._is_behind:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _purge(self) -> None:
        now = self.deliveries.now()
        if now - self._purged_at >= PURGE_SECONDS and await self.deliveries.purge() < MAX_PURGED:
            self._purged_at = now

    async def _when_possible(self, claimed_by: str | None) -> None:
        while True:
            try:
                await self.deliveries.release(claimed_by)
            except StoreUnavailableError as error:
                self._complain(str(error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _end(self) -> None:
        sending = list(self._sending.values())
        for task in sending:
            task.cancel()
        if sending:
            await asyncio.wait(sending)
        try:
            await self.deliveries.release(self._name)
        except StoreUnavailableError:
            log.info("webhooks under way are tried again when their claims have ended")
        await self._sender.close()

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("webhooks wait for the store", problem=problem)
        self._problem = problem


class WebhookPermits:
    """Counts what is under way to each host, and remembers who was quick.

    Rule: a host has to earn its permits. A host that is not known yet gets one. Each try that is
    answered doubles that, up to a share of all; a try without an answer puts the host back to one.
    Slow hosts share some permits, and some are kept for hosts that are known to be quick. So
    whoever hangs, or invents hosts, waits beside the quick ones and not in front of them.

    Of all permits, of those for hosts that are not known to be quick, and of those for slow hosts a
    project may have a share, and one at least. So whoever has a thousand receivers that hang delays
    its own messages, and those of other projects find a permit.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._per_host = max(1, total // HOSTS_AT_LEAST)
        self._per_site = max(1, total // 2)
        self._for_slow = max(1, total // HOSTS_AT_LEAST)
        self._for_unproven = max(1, total - total // HOSTS_AT_LEAST)
        self._by_host: Counter[str] = Counter()
        self._by_project: dict[str, Counter[str]] = {}
        self._quick: OrderedDict[str, int] = OrderedDict()
        self._slow: OrderedDict[str, int] = OrderedDict()

    @property
    def free(self) -> int:
        """How many more may be under way."""
        return self._total - self._by_host.total()

    def open_to(self) -> Choice:
        """Return for whom there is a permit at all."""
        full = [host for host, count in self._by_host.items() if count >= self._allowance(host)]
        sites = [site for site, count in self._sites().items() if count >= self._per_site]
        if self._unproven() >= self._for_unproven:
            proven = [host for host in self._quick if host not in full]
            return Choice(only_hosts=tuple(proven), busy_sites=tuple(sites))
        slow = self._slow if self._under_way(self._slow) >= self._for_slow else ()
        projects = list(self._by_project)
        at_bound = [one for one in projects if not self._has_share(one)]
        unproven = [one for one in projects if not self._has_share_of_unproven(one)]
        of_slow = [one for one in projects if not self._has_share_of_slow(one)]
        return Choice(
            busy_hosts=tuple({*full, *slow}),
            busy_sites=tuple(sites),
            busy_projects=tuple(at_bound),
            proven_projects=tuple(unproven),
            proven_hosts=tuple(self._quick) if unproven else (),
            slow_projects=tuple(of_slow),
            slow_hosts=tuple(self._slow) if of_slow else (),
        )

    def choose(self, found: Iterable[Candidate], under_way: Container[str]) -> list[Candidate]:
        """Return who gets a permit: projects and hosts with least under way first, then by age."""
        kept, projects, chosen = self._by_host, self._by_project, list[Candidate]()
        self._by_host = kept.copy()
        self._by_project = {name: hosts.copy() for name, hosts in projects.items()}
        for candidate in _in_turns(found, kept, projects):
            if candidate.id not in under_way and self._has_permit(candidate):
                self.begin(candidate.host, candidate.project_id)
                chosen.append(candidate)
        # A permit is taken when the message is claimed.
        self._by_host, self._by_project = kept, projects
        return chosen

    def _has_permit(self, candidate: Candidate) -> bool:
        """Tell whether one more of a project may go to a host now."""
        host, project_id = candidate.host, candidate.project_id
        if self.free <= 0 or self._by_host[host] >= self._allowance(host):
            return False
        if self._sites()[_site(host)] >= self._per_site or not self._has_share(project_id):
            return False
        if host in self._quick:
            return True
        if host in self._slow and not (
            self._under_way(self._slow) < self._for_slow and self._has_share_of_slow(project_id)
        ):
            return False
        return self._unproven() < self._for_unproven and self._has_share_of_unproven(project_id)

    def begin(self, host: str, project_id: str = "") -> None:
        """Take a permit."""
        self._by_host[host] += 1
        self._by_project.setdefault(project_id, Counter())[host] += 1

    def end(self, host: str, pace: Pace | None, project_id: str = "") -> None:
        """Give a permit back, and remember how the host did; None says nothing of it."""
        for hosts in (self._by_host, self._by_project[project_id]):
            hosts[host] -= 1
            if not hosts[host]:
                del hosts[host]
        if not self._by_project[project_id]:
            del self._by_project[project_id]
        if pace is None:
            return
        is_slow = pace.seconds > SLOW_SECONDS
        # A refusal that comes at once holds nobody up, with an answer or without.
        has_earned = pace.has_answered or not is_slow
        earned = min(self._per_host, 2 * self._allowance(host)) if has_earned else 1
        here, there = (self._slow, self._quick) if is_slow else (self._quick, self._slow)
        there.pop(host, None)
        _remember(here, host, earned)

    def _allowance(self, host: str) -> int:
        return self._quick.get(host) or self._slow.get(host, 1)

    def _unproven(self) -> int:
        return self._by_host.total() - self._under_way(self._quick)

    def _under_way(self, hosts: Container[str]) -> int:
        return sum(count for host, count in self._by_host.items() if host in hosts)

    def _has_share(self, project_id: str) -> bool:
        return _is_within(project_id, self._of(project_id).total(), self.free)

    def _has_share_of_unproven(self, project_id: str) -> bool:
        own = sum(n for host, n in self._of(project_id).items() if host not in self._quick)
        return _is_within(project_id, own, self._for_unproven - self._unproven())

    def _has_share_of_slow(self, project_id: str) -> bool:
        own = sum(n for host, n in self._of(project_id).items() if host in self._slow)
        return _is_within(project_id, own, self._for_slow - self._under_way(self._slow))

    def _of(self, project_id: str) -> Counter[str]:
        return self._by_project.get(project_id, _NONE)

    def _sites(self) -> Counter[str]:
        sites: Counter[str] = Counter()
        for host, count in self._by_host.items():
            sites[_site(host)] += count
        return sites


def _is_within(project_id: str, own: int, free: int) -> bool:
    """Tell whether a project that has so many permits may have one more of those that are free."""
    return not project_id or not own or own + 1 <= PROJECT_SHARE * (free - 1)


def _in_turns(
    found: Iterable[Candidate], under_way: Counter[str], projects: Mapping[str, Counter[str]]
) -> list[Candidate]:
    """Order candidates so that each project, and of it each host, has one before any has two.

    Who has some under way comes later.
    """
    hosts = under_way.copy()
    turns = Counter({project_id: own.total() for project_id, own in projects.items()})
    by_host, by_project = list[tuple[int, Candidate]](), list[tuple[int, Candidate]]()
    for candidate in found:
        hosts[candidate.host] += 1
        by_host.append((hosts[candidate.host], candidate))
    for _, candidate in sorted(by_host, key=_turn):
        turns[candidate.project_id] += 1
        by_project.append((turns[candidate.project_id], candidate))
    return [candidate for _, candidate in sorted(by_project, key=_turn)]


def _turn(ordered: tuple[int, Candidate]) -> int:
    return ordered[0]


@lru_cache(maxsize=MAX_REMEMBERED)
def _site(host: str) -> str:
    """Return the end of a name, below which hosts cost nothing to make; an address is its own."""
    try:
        ip_address(host)
    except ValueError:
        return ".".join(host.split(".")[-SITE_LABELS:])
    return host


def _remember(hosts: OrderedDict[str, int], host: str, permits: int) -> None:
    hosts[host] = permits
    hosts.move_to_end(host)
    if len(hosts) > MAX_REMEMBERED:
        hosts.popitem(last=False)


def _pace(done: asyncio.Task[Pace | None]) -> Pace | None:
    return None if done.cancelled() or done.exception() is not None else done.result()


def _log_unsettled(message: Message, problem: str) -> None:
    """Log that the claim has to end by itself, upon which the message is tried again."""
    log.warning("a webhook was not settled", message_id=message.id, problem=problem)


def _log_try(message: Message, outcome: TryOutcome, *, problem: str | None, seconds: float) -> None:
    """Log what came of a try, in words of our own.

    Of the address no more than the host, and nothing of what the receiver said: either may repeat a
    secret, and what was said is kept with the delivery.
    """
    facts = {
        "message_id": message.id,
        "webhook_event": message.event,
        "task_id": message.task_id,
        "host": host_of(message.url),
        "status": outcome.status,
        "tries": message.tries + 1,
        "seconds": round(seconds, 3),
    }
    if outcome.has_arrived:
        log.info("webhook delivered", **facts)
    else:
        is_dead = outcome.due_at is None
        log.warning("webhook failed", **facts, problem=problem, is_given_up=is_dead)


def _location_of(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def next_try_at(
    tries: int, *, now: float, draw: float, asked_seconds: float | None = None
) -> float | None:
    """Return when a delivery that failed `tries` times is due again; None if it was the last try.

    `asked_seconds` is what the receiver asked for; `draw` is in [0, 1). Rule: a wait is never
    shorter than the table says. Randomness only makes it longer, so that what failed together does
    not come back together. A receiver that asks for more time gets it, within a bound.
    """
    if tries >= MOST_TRIES:
        return None
    wait = WAITS_SECONDS[max(tries, 1) - 1] * (1 + SPREAD * draw)
    if asked_seconds is not None:
        wait = max(wait, min(asked_seconds, LONGEST_WAIT_SECONDS))
    return now + wait
