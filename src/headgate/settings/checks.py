"""What a type cannot say: keys that contradict each other, and texts with a grammar of their own.

Rule: whatever would fail at the start of the service, and can be known before it, fails here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from headgate.core.budgets.scopes import parse_scope
from headgate.core.snapshot import MIN_CREDIT_WEIGHT
from headgate.errors import InvalidFieldError, InvalidScopeError, InvalidSettingError
from headgate.executors.targets import PULL_NAME, PullTarget
from headgate.settings.messages import key_path
from headgate.settings.sections import AuthSettings, SchedulerSettings, Settings, WebhookSettings
from headgate.settings.slot_checks import check_slots
from headgate.webhooks.allow_list import parse_allow_list

MAX_NAMES = 10_000
MAX_NAME_LENGTH = 128
STORE_URLS = ("sqlite:///headgate.db", "postgresql://host/database", "memory:")
_HOST = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?", re.ASCII)
_ADDRESS = re.compile(rf"https?://{_HOST.pattern}", re.ASCII)
LEDGER_URLS = (
    *STORE_URLS,
    "redis://127.0.0.1:6379/0",
    "rediss://host:6379/0",
    "unix:///redis.sock",
)


@contextmanager
def at_key(*parts: str) -> Iterator[None]:
    """Say of this key what is wrong with the value that a rule of the core refuses."""
    try:
        yield
    except InvalidFieldError as error:
        raise InvalidSettingError(key_path(*parts), error.problem) from None


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
    _check_scheduler(settings.scheduler)
    _check_projects(settings)
    _check_targets(settings)
    _check_pulling(settings)
    check_slots(settings)
    _check_advertised(settings.server.advertise)
    _check_auth(settings.auth)
    _check_webhooks(settings.webhooks)
    _check_url("store", settings.store.url, STORE_URLS)
    _check_url("ledger", settings.ledger.url, LEDGER_URLS)


def _check_scheduler(scheduler: SchedulerSettings) -> None:
    with at_key("scheduler", "alpha"):
        _ = scheduler.resolved_alpha
    with at_key("scheduler", "default_cost_usd"):
        _ = scheduler.default_cost_micro_usd
    base, longest = scheduler.retry_base_seconds, scheduler.retry_max_seconds
    if longest < base:
        problem = f"must be at least retry_base_seconds ({base:g}), not {longest:g}"
        raise InvalidSettingError("scheduler.retry_max_seconds", problem)


def _check_projects(settings: Settings) -> None:
    for name, project in settings.projects.items():
        _check_project_name(name)
        if 0 < project.credit_weight < MIN_CREDIT_WEIGHT:
            problem = f"must be 0, or {MIN_CREDIT_WEIGHT} or more, not {project.credit_weight}"
            raise InvalidSettingError(key_path("projects", name, "credit_weight"), problem)


def _check_project_name(name: str) -> None:
    # A project's name is part of the scope of its budget.
    try:
        parse_scope(f"project:{name}")
    except InvalidScopeError:
        problem = "a project's name is made of letters, digits and . _ @ + -, and not too long"
        raise InvalidSettingError(key_path("projects", name), problem) from None


def _check_pulling(settings: Settings) -> None:
    if not isinstance(settings.all_targets[PULL_NAME], PullTarget):
        problem = f"the target {PULL_NAME} is what workers pull; give this one another name"
        raise InvalidSettingError(key_path("targets", PULL_NAME), problem)
    for name, agent in settings.agents.items():
        if agent.target is not None and agent.target not in settings.all_targets:
            problem = f"there is no target {agent.target!r}; name one of the section targets"
            raise InvalidSettingError(key_path("agents", name, "target"), problem)


def _check_targets(settings: Settings) -> None:
    marked = [name for name, target in settings.targets.items() if target.default]
    for name in marked[1:]:
        problem = f"{marked[0]} is the default already; mark one target"
        raise InvalidSettingError(key_path("targets", name, "default"), problem)


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
    with at_key("webhooks", "allow"):
        parse_allow_list(webhooks.allow)
    url = webhooks.alerts_url
    if url is not None and not url.lower().startswith(("http://", "https://")):
        problem = "is an http or https address, as in https://hooks.example/budgets"
        raise InvalidSettingError("webhooks.alerts_url", problem)


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
