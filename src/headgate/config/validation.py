"""What a type cannot say: keys that contradict each other, and texts with a grammar of their own.

Rule: whatever would fail at the start of the service, and can be known before it, fails here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

import msgspec

from headgate.config.messages import key_path
from headgate.config.settings import (
    BASE_URLS,
    DEFAULT_PROJECT,
    SLOTS,
    UPSTREAMS,
    AuthSettings,
    PriceSettings,
    SchedulerSettings,
    Settings,
    SlotSettings,
    StoreSettings,
    UpstreamSettings,
    WebhookSettings,
)
from headgate.config.slot_keys import endpoint_of, quota_source, wake_config
from headgate.core.budgets.scopes import parse_scope
from headgate.core.money import MAX_RESERVATION_MICRO_USD, MICRO_PER_USD, MicroUsd, to_micro_usd
from headgate.core.slots.wakes import check_wake_config
from headgate.core.snapshot import BUILT_IN_AGENT, MIN_CREDIT_WEIGHT, RESERVED, Standing
from headgate.core.task import UPSTREAM_PREFIX
from headgate.core.text import did_you_mean, nearest
from headgate.errors import (
    InvalidAmountError,
    InvalidFieldError,
    InvalidScopeError,
    InvalidSettingError,
    Problems,
)
from headgate.executors.targets import BUILT_IN_TARGETS, GatewayTarget
from headgate.executors.templates import KEY
from headgate.providers.endpoints import HTTP_JSON, ZAI, ProviderEndpoint, check_endpoint
from headgate.providers.http_headers import HEADER_NAME
from headgate.redaction import redacted

# What the types of slots cannot say: keys that exclude or need each other, addresses, times.
#
# Rule: a key of a provider goes only where nobody on the way can read it. Plain http is for this
# machine, and an address carries no password.

LEAST_KEY_LENGTH = 20
ADDRESSES = ("base_url", "quota_url", "request_url")
_SAID_BY_GATEWAY = ("slot", "provider", "gateway", "book_failures")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PLACEHOLDER = re.compile(r"\{[A-Za-z_][\w.]*\}")
_FROM_ENVIRONMENT = {"{env.NAME}": re.compile(r"\{env\.\w+\}")}
_IN_SLOTS = {"{key}": re.compile(r"\{key\}"), **_FROM_ENVIRONMENT}
_LOOPBACK = re.compile(r"localhost|127(\.[0-9]{1,3}){3}|::1")


def check_slots(settings: Settings) -> None:
    """Raise `InvalidSettingError`, naming the key, unless every slot could be run."""
    count, most = len(settings.slots), settings.quota.max_slots
    if count > most:
        problem = f"has {count} slots, and quota.max_slots is {most}; raise it, or leave some out"
        raise InvalidSettingError(SLOTS, problem)
    found = Problems(InvalidSettingError)
    for slot in settings.slots.values():
        with found.collected():
            _check_slot(settings, slot)
    with found.collected():
        _check_providers(settings)
    with found.collected():
        _check_key_places(settings)
    found.check()


def slot_label_warnings(settings: Settings) -> list[str]:
    """List targets whose slot is not configured, though others are.

    Without any slot in the file the name is a label: a rate limit, and what a 429 pauses.
    """
    if not settings.slots:
        return []
    return [
        f"{key_path('targets', name, 'slot')}: no [[slots]] has the name {target.slot!r}; "
        "its quota is not read"
        for name, target in settings.targets.items()
        if target.slot is not None and target.slot not in settings.slots
    ]


def _check_slot(settings: Settings, slot: SlotSettings) -> None:
    where = (SLOTS, slot.name)
    _check_slot_projects(settings, slot, where)
    _check_key(slot, where)
    _check_headers(slot.headers, where, _IN_SLOTS)
    wakes = bool(slot.wake_modes)
    check_endpoint(slot.provider, endpoint_of(slot), setting=key_path(*where), wakes=wakes)
    _check_addresses(slot, where)
    if slot.poll == "request" and quota_source(slot) == "address":
        problem = "would cost a request, and the quota is told for nothing here; leave it out"
        raise InvalidSettingError(key_path(*where, "poll"), problem)
    if slot.limit_unit is not None and slot.limit_type is None:
        problem = "needs limit_type, the type of the row that it is the unit of"
        raise InvalidSettingError(key_path(*where, "limit_unit"), problem)
    try:
        check_wake_config(wake_config(settings.quota, slot))
    except InvalidSettingError as error:
        raise InvalidSettingError(key_path(*where, error.field), error.problem) from None


def _check_slot_projects(settings: Settings, slot: SlotSettings, where: tuple[str, str]) -> None:
    known = {DEFAULT_PROJECT, *settings.projects}
    for name in slot.projects or ():
        if name not in known:
            problem = f"there is no project {name!r}; add it under [projects], or leave it out"
            raise InvalidSettingError(key_path(*where, "projects"), problem)


def _check_key(slot: SlotSettings, where: tuple[str, str]) -> None:
    field = key_path(*where, "key_env")
    if slot.key_env is None and slot.key_file is None:
        raise InvalidSettingError(field, "is missing; write it, or key_file")
    if slot.key_env is None:
        return
    if slot.key_file is not None:
        raise InvalidSettingError(field, "give either key_env or key_file, not both")
    _check_variable(slot.key_env, field, example="ZAI_KEY")


def _check_variable(name: str, field: str, *, example: str) -> None:
    if not _VARIABLE.fullmatch(name) or _looks_like_a_key(name):
        # Whoever writes the key itself here must not find it in a message.
        problem = f"is the name of a variable, as {example}; the key itself is not written here"
        raise InvalidSettingError(field, problem)


def _looks_like_a_key(name: str) -> bool:
    is_random = len(name) >= LEAST_KEY_LENGTH and "_" not in name and re.search("[0-9]", name)
    return bool(is_random) or redacted(name) != name


def _check_headers(
    headers: Mapping[str, str], where: tuple[str, str], known: Mapping[str, re.Pattern[str]]
) -> None:
    for name, value in headers.items():
        field = key_path(*where, "headers", name)
        if not HEADER_NAME.fullmatch(name):
            raise InvalidSettingError(field, "is not the name of a header")
        for one in _PLACEHOLDER.findall(value):
            if not any(pattern.fullmatch(one) for pattern in known.values()):
                raise InvalidSettingError(
                    field, f"{one} is unknown; it may be {' or '.join(known)}"
                )


def _check_addresses(slot: SlotSettings, where: tuple[str, str]) -> None:
    for name in ADDRESSES:
        _check_address(getattr(slot, name) or "", key_path(*where, name), carries_key=True)
    if slot.provider == HTTP_JSON and slot.base_url is not None:
        problem = "has no meaning for http-json; write quota_url and request_url"
        raise InvalidSettingError(key_path(*where, "base_url"), problem)


def _check_address(url: str, field: str, *, carries_key: bool) -> None:
    place = urlsplit(url)
    if "@" in place.netloc:
        raise InvalidSettingError(field, "has a user or a password in it; take it out")
    is_open = place.scheme == "http" and not _LOOPBACK.fullmatch(place.hostname or "")
    if carries_key and is_open:
        problem = "would send the key unencrypted; write https, as http is for this machine only"
        raise InvalidSettingError(field, problem)


def _check_providers(settings: Settings) -> None:
    known = {slot.provider for slot in settings.slots.values()}
    found = Problems(InvalidSettingError)
    for name, target in settings.targets.items():
        # What drains may have left the file together with its slots.
        if target.provider is None or target.status is Standing.DRAINING:
            continue
        field = key_path("targets", name, "provider")
        if target.slot is not None:
            found.add(InvalidSettingError(field, "give either slot or provider, not both"))
        elif target.provider not in known:
            problem = f"no [[slots]] has the provider {target.provider!r}; add one, or correct it"
            found.add(InvalidSettingError(field, problem))
    found.check()


def _check_key_places(settings: Settings) -> None:
    """Refuse a target that writes the key of a slot which has none to be read."""
    found = Problems(InvalidSettingError)
    for name, target in settings.targets.items():
        is_label = target.slot is not None and target.slot not in settings.slots
        if not is_label or target.status is Standing.DRAINING:
            continue
        if f"{{{KEY}}}" in msgspec.json.encode(target).decode():
            problem = f"no [[slots]] has the name {target.slot!r}, and {{{KEY}}} needs its key"
            field = key_path("targets", name, "slot")
            found.add(InvalidSettingError(field, f"{problem}; add it, or correct the name"))
    found.check()


# What the types of the gateway cannot say: which upstreams can be reached with which keys, and
# whether a route leads to one.
#
# Rule: a call leaves this service, and each member of a route says where to. No address is this
# service's own, and no member is a name that stands for others.

KEY_HEADERS = frozenset({"authorization", "proxy-authorization", "x-api-key"})
"""Headers that carry a key, which nobody writes beside the one that an upstream has."""

_UPSTREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_EVERY_ADDRESS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  named, not listened on
_WILDCARDS = frozenset("*?")


def check_gateway(settings: Settings) -> None:
    """Raise `InvalidSettingError`, naming the key, unless calls could go where they are to."""
    found = Problems(InvalidSettingError)
    for name, upstream in settings.upstreams.items():
        with found.collected():
            if not _UPSTREAM_NAME.fullmatch(name):
                problem = "an upstream's name is made of letters, digits and . _ -"
                raise InvalidSettingError(key_path(UPSTREAMS, name), problem)
            _check_upstream(settings, upstream, (UPSTREAMS, name))
    for name, model in settings.models.items():
        with found.collected():
            _check_alias(name)
        for place, member in enumerate(model.route):
            problem = _problem_of_member(settings, member)
            if not problem and member in model.route[:place]:
                problem = f"{_shown(member)} is in this route already; leave it out"
            if problem:
                field = key_path("models", name, "route", f"[{place}]")
                found.add(InvalidSettingError(field, problem))
    found.check()


def _check_upstream(settings: Settings, upstream: UpstreamSettings, where: tuple[str, str]) -> None:
    if upstream.key_env is not None:
        field = key_path(*where, "key_env")
        if upstream.slots:
            raise InvalidSettingError(field, "give either key_env or slots, not both")
        _check_variable(upstream.key_env, field, example="OPENAI_API_KEY")
    for place, slot in enumerate(upstream.slots):
        field = key_path(*where, SLOTS, f"[{place}]")
        if slot not in settings.slots:
            problem = f"no [[slots]] has the name {_shown(slot)}; add one, or correct the name"
            raise InvalidSettingError(field, problem)
        if slot in upstream.slots[:place]:
            raise InvalidSettingError(field, f"{_shown(slot)} is in the list already; leave it out")
    _check_slot_providers(settings, upstream, where)
    for place, pattern in enumerate(upstream.models):
        if not pattern.isprintable() or pattern.strip() != pattern:
            problem = "is a name or a pattern as claude-*, printable, with no space at its ends"
            raise InvalidSettingError(key_path(*where, "models", f"[{place}]"), problem)
    _check_headers(upstream.headers, where, _FROM_ENVIRONMENT)
    for header in upstream.headers:
        if header.lower() in KEY_HEADERS:
            problem = "carries a key, which is not written into the file; use key_env or slots"
            raise InvalidSettingError(key_path(*where, "headers", header), problem)
    endpoint = ProviderEndpoint(base_url=upstream.base_url, headers=upstream.headers)
    check_endpoint(upstream.kind, endpoint, setting=key_path(*where))
    _check_base_url(settings, upstream, key_path(*where, "base_url"))


def _check_slot_providers(
    settings: Settings, upstream: UpstreamSettings, where: tuple[str, str]
) -> None:
    """Refuse an upstream that would get the key of another provider."""
    for place, name in enumerate(upstream.slots):
        provider, kind = settings.slots[name].provider, upstream.kind
        problem = ""
        if provider in BASE_URLS and provider != kind:
            problem = f"and an upstream of kind {kind} takes no key of {provider}"
        elif provider == ZAI and upstream.base_url is None:
            problem = f"and without base_url its key would go to {kind}; write base_url"
        if problem:
            line = f"{_shown(name)} is a slot of {provider}, {problem}"
            raise InvalidSettingError(key_path(*where, SLOTS, f"[{place}]"), line)


def _check_base_url(settings: Settings, upstream: UpstreamSettings, field: str) -> None:
    place = urlsplit(upstream.url)
    _check_address(upstream.url, field, carries_key=upstream.has_key)
    if "?" in upstream.url or "#" in upstream.url:
        problem = "has a ? or # in it, and paths are put behind it; take that out"
        raise InvalidSettingError(field, problem)
    server, host = settings.server, place.hostname or ""
    own = urlsplit(server.advertise or "")
    port = place.port or (443 if place.scheme == "https" else 80)
    is_every = server.host in _EVERY_ADDRESS
    is_here = host == server.host or (is_every and host in _EVERY_ADDRESS)
    is_local = bool(_LOOPBACK.fullmatch(host))
    is_here = is_here or (is_local and (is_every or bool(_LOOPBACK.fullmatch(server.host))))
    if (is_here and port == server.port) or (own.hostname == host and own.port == port):
        problem = "is this service itself, so that calls would go round and round; name a provider"
        raise InvalidSettingError(field, problem)


def _check_alias(name: str) -> None:
    if name.strip() != name:
        raise InvalidSettingError(key_path("models", name), "has spaces at its ends; take them out")
    if _WILDCARDS & set(name):
        problem = "is a name and no pattern; patterns are for models of [upstreams]"
        raise InvalidSettingError(key_path("models", name), problem)


def _problem_of_member(settings: Settings, member: str) -> str:
    """Say what is wrong with a member of a route; nothing if it leads to an upstream."""
    upstream, slash, model = member.partition("/")
    known = settings.all_upstreams
    if not member.isprintable() or member.strip() != member:
        return "is written upstream/model, printable, with no space at its ends"
    if not slash and member in settings.models:
        return (
            f"{_shown(member)} is a name of [models]; write what it stands for, as upstream/model"
        )
    if not slash and member not in known:
        likely = "anthropic" if member.lower().startswith("claude") else "openai"
        return f'{_shown(member)} does not say where; write the upstream before it, as "{likely}/…"'
    if upstream not in known:
        return f"there is no upstream {_shown(upstream)}; known are {', '.join(known)}"
    if not model:
        return f'{_shown(member)} names no model; write it behind, as "{upstream}/MODEL"'
    if _WILDCARDS & set(model):
        return f"{_shown(member)} is a pattern; write the name of one model"
    return ""


def _shown(text: str) -> str:
    return repr(text[:_SHOWN_CHARACTERS])


MAX_NAMES = 10_000
_SHOWN_CHARACTERS = 40
MAX_NAME_LENGTH = 128
DOMAIN = re.compile(r"[a-z][a-z0-9_]{0,29}")
STORE_URLS = ("sqlite:///headgate.db", "postgresql://host/database", "memory:")
_HOST = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?", re.ASCII)
_ADDRESS = re.compile(rf"https?://{_HOST.pattern}", re.ASCII)
LEDGER_URLS = (
    *STORE_URLS,
    "redis://127.0.0.1:6379/0",
    "rediss://host:6379/0",
    "unix:///redis.sock",
    "redis+sentinel://host:26379,host2:26379/service/0",
    "rediss+sentinel://host/service",
    "redis+cluster://host:6379,host2:6379",
    "rediss+cluster://host:6379",
)


@contextmanager
def at_key(*parts: str) -> Iterator[None]:
    """Say of this key what is wrong with the value that a rule of the core refuses."""
    try:
        yield
    except InvalidFieldError as error:
        raise InvalidSettingError(key_path(*parts), error.problem) from None


@contextmanager
def at_dollars(value: object, most: MicroUsd, *parts: str) -> Iterator[None]:
    """Say of this key which dollars it may be, when a rule of the core refuses them."""
    try:
        yield
    except InvalidAmountError:
        shown = repr(value[:_SHOWN_CHARACTERS]) if isinstance(value, str) else str(value)
        problem = f"must be dollars from 0 to {most // MICRO_PER_USD:,}, not {shown}"
        raise InvalidSettingError(key_path(*parts), problem) from None


def check_names(section: str, names: Iterable[str]) -> None:
    """Refuse names that could not be shown, and more of them than can be meant."""
    for count, name in enumerate(names, 1):
        if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            problem = f"a name has 1 to {MAX_NAME_LENGTH} characters, all of them printable"
            raise InvalidSettingError(key_path(section, name), problem)
        if count > MAX_NAMES:
            raise InvalidSettingError(section, f"has more than {MAX_NAMES:,} names; leave some out")


def check(settings: Settings) -> None:
    """Raise `InvalidSettingError`, naming the key, unless the settings go together."""
    found = Problems(InvalidSettingError)
    for each in (
        partial(_check_scheduler, settings.scheduler),
        partial(_check_projects, settings),
        partial(check_prices, settings.prices),
        partial(_check_targets, settings),
        partial(_check_pulling_and_agents, settings),
        partial(check_slots, settings),
        partial(check_gateway, settings),
        partial(_check_advertised, settings.server.advertise),
        partial(_check_auth, settings.auth),
        partial(_check_webhooks, settings.webhooks),
        partial(_check_url, "store", settings.store.url, STORE_URLS),
        partial(_check_domain, settings.store),
        partial(_check_url, "ledger", settings.ledger.url, LEDGER_URLS),
    ):
        with found.collected():
            each()
    found.check()


def _check_scheduler(scheduler: SchedulerSettings) -> None:
    with at_key("scheduler", "alpha"):
        _ = scheduler.resolved_alpha
    if scheduler.auto_tune and scheduler.allow_unsafe_alpha:
        problem = "keeps alpha at most 0.5; leave out allow_unsafe_alpha"
        raise InvalidSettingError("scheduler.auto_tune", problem)
    base, longest = scheduler.retry_base_seconds, scheduler.retry_max_seconds
    if longest < base:
        problem = f"must be at least retry_base_seconds ({base:g}), not {longest:g}"
        raise InvalidSettingError("scheduler.retry_max_seconds", problem)


def _check_projects(settings: Settings) -> None:
    found = Problems(InvalidSettingError)
    for name, project in settings.projects.items():
        with found.collected():
            _check_project_name(name)
        if 0 < project.credit_weight < MIN_CREDIT_WEIGHT:
            problem = f"must be 0, or {MIN_CREDIT_WEIGHT} or more, not {project.credit_weight}"
            field = key_path("projects", name, "credit_weight")
            found.add(InvalidSettingError(field, problem))
    found.check()


def check_prices(prices: Mapping[str, PriceSettings]) -> None:
    """Raise `InvalidSettingError`, naming the key, unless every price can be computed with."""
    seen: dict[str, str] = {}
    found = Problems(InvalidSettingError)
    for pattern, price in prices.items():
        same = seen.setdefault(pattern.lower(), pattern)
        if same != pattern:
            problem = f"{key_path('prices', same)} is the same model; keep one of them"
            found.add(InvalidSettingError(key_path("prices", pattern), problem))
        for key, dollars in msgspec.structs.asdict(price).items():
            place = ("prices", pattern, key)
            with found.collected(), at_dollars(dollars, MAX_RESERVATION_MICRO_USD, *place):
                _ = None if dollars is None else to_micro_usd(dollars)
    found.check()


def _check_project_name(name: str) -> None:
    # A project's name is part of the scope of its budget.
    try:
        parse_scope(f"project:{name}")
    except InvalidScopeError:
        problem = "a project's name is made of letters, digits and . _ @ + -, and not too long"
        raise InvalidSettingError(key_path("projects", name), problem) from None


def _check_pulling_and_agents(settings: Settings) -> None:
    found = Problems(InvalidSettingError)
    for name, built_in in BUILT_IN_TARGETS.items():
        if type(settings.all_targets[name]) is not type(built_in):
            problem = f"the target {name} is always of kind {name}; give this one another name"
            found.add(InvalidSettingError(key_path("targets", name), problem))
    for name, target in settings.targets.items():
        for key in _SAID_BY_GATEWAY if isinstance(target, GatewayTarget) else ():
            if getattr(target, key) is not None:
                problem = "is for the gateway to say; leave it out"
                found.add(InvalidSettingError(key_path("targets", name, key), problem))
    if BUILT_IN_AGENT in settings.agents:
        found.add(InvalidSettingError(key_path("agents", BUILT_IN_AGENT), RESERVED))
    for name, agent in settings.agents.items():
        if agent.target is not None and agent.target not in settings.all_targets:
            meant = did_you_mean(
                nearest(agent.target, settings.all_targets), "name one of the section targets"
            )
            problem = f"there is no target {agent.target!r}; {meant}"
            found.add(InvalidSettingError(key_path("agents", name, "target"), problem))
    found.check()


def _check_targets(settings: Settings) -> None:
    found = Problems(InvalidSettingError)
    for name, target in settings.targets.items():
        if name.startswith(UPSTREAM_PREFIX):
            problem = f"a name with {UPSTREAM_PREFIX} before it is of calls; give it another"
            found.add(InvalidSettingError(key_path("targets", name), problem))
        if target.estimate_usd is not None:
            said, place = target.estimate_usd, ("targets", name, "estimate_usd")
            with found.collected(), at_dollars(said, MAX_RESERVATION_MICRO_USD, *place):
                to_micro_usd(said, field="estimate_usd")
    marked = [name for name, target in settings.targets.items() if target.default]
    for name in marked[1:]:
        problem = f"{marked[0]} is the default already; mark one target"
        found.add(InvalidSettingError(key_path("targets", name, "default"), problem))
    found.check()


def _check_advertised(address: str | None) -> None:
    if address is None or _ADDRESS.fullmatch(address) is not None:
        return
    problem = "is the scheme, the host and the port, as in http://10.0.0.5:7420"
    raise InvalidSettingError("server.advertise", problem)


def _check_auth(auth: AuthSettings) -> None:
    for place, host in enumerate(auth.allowed_hosts):
        if _HOST.fullmatch(host) is None:
            problem = "is a host, with a port or without, as in headgate.example:8443"
            raise InvalidSettingError(key_path("auth", "allowed_hosts", f"[{place}]"), problem)
    for place, origin in enumerate(auth.allowed_origins):
        if _ADDRESS.fullmatch(origin) is None:
            problem = "is a scheme, a host and perhaps a port, as in https://headgate.example"
            raise InvalidSettingError(key_path("auth", "allowed_origins", f"[{place}]"), problem)


def _check_webhooks(webhooks: WebhookSettings) -> None:
    if webhooks.allow:
        from headgate.webhooks.guard import parse_allow_list  # noqa: PLC0415  needs an extra

        with at_key("webhooks", "allow"):
            parse_allow_list(webhooks.allow)
    url = webhooks.alerts_url
    if url is not None and not url.lower().startswith(("http://", "https://")):
        problem = "is an http or https address, as in https://hooks.example/budgets"
        raise InvalidSettingError("webhooks.alerts_url", problem)


def _check_domain(store: StoreSettings) -> None:
    if not store.domain:
        return
    if not DOMAIN.fullmatch(store.domain):
        problem = "has up to 30 small letters, digits and _, and begins with a letter"
        raise InvalidSettingError("store.domain", problem)
    if (store.url or "").partition(":")[0].lower() not in ("postgresql", "postgres"):
        problem = "is a part of a PostgreSQL database; set store.url to one, or leave it out"
        raise InvalidSettingError("store.domain", problem)


def _check_url(section: str, url: str | None, known: tuple[str, ...]) -> None:
    # A URL may carry a password, so no more of it than its scheme is repeated.
    if url is None:
        return
    scheme, colon, rest = url.partition(":")
    schemes = {example.partition(":")[0]: example for example in known} | {"postgres": ""}
    field = f"{section}.url"
    if not colon or scheme.lower() not in schemes:
        problem = "has no scheme" if not colon else f"{scheme[:20]!r} is not a scheme for it"
        raise InvalidSettingError(field, f"{problem}; write one as {', '.join(known)}")
    if (scheme.lower() == "memory") != (not rest):
        raise InvalidSettingError(field, f"write one as {', '.join(known)}")
    if scheme.lower() == "sqlite" and (not rest.startswith("///") or rest == "///"):
        problem = "a path follows sqlite:///, as in sqlite:///headgate.db"
        raise InvalidSettingError(field, f"{problem} or sqlite:////var/lib/headgate/headgate.db")
