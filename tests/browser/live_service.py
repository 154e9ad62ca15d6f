"""The service that the browser visits: `headgate up` with tokens, slots, budgets and a receiver.

Tests share it, since a start takes a second. Rule: each test works on a project, a scope or a slot
of its own, and leaves the rest as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from gateway.billing_upstream import BillingUpstream, upstream_in_thread
from service.fake_providers import fake_provider
from service.support import ServiceProcess, running_service
from service.test_webhooks import Receiver, running_receiver

KEY = "sk-no-key-of-anybody"
MODEL_KEY = "MODEL_KEY_OF_TESTS"
SETTINGS = """
[auth]
required = true

[scheduler]
max_inflight = 100
max_queue_size = 5000
max_per_agent = 5000
drain_seconds = 0
tick_seconds = 1
retry_base_seconds = 0.05

[webhooks]
allow = ["127.0.0.0/8"]

[targets.work]
kind = "callable"
entry_point = "browser.work:run"
default = true

[targets.other]
kind = "callable"
entry_point = "browser.work:run"

[projects.search]
credit_weight = 3

[projects.evals]
credit_weight = 1

[projects.narrow]
max_concurrent_agents = 1

[projects.switched]
credit_weight = 1

[projects.first-tab]
credit_weight = 1

[projects.second-tab]
credit_weight = 1

[budgets.root]
limit_usd = "1000"

[budgets."session:tight"]
limit_tokens = 1000
window = "day"

[projects.asking]
credit_weight = 1

[upstreams.slow]
kind = "openai"
base_url = "{upstream}"
key_env = "MODEL_KEY_OF_TESTS"
models = ["gpt-5*"]
max_inflight = 1

[[slots]]
name = "morning"
provider = "zai"
base_url = "{provider}"
key_file = "{key}"

[[slots]]
name = "spare"
provider = "zai"
base_url = "{provider}"
key_file = "{key}"
"""


class Live(NamedTuple):
    """A service that runs, and what stands around it."""

    service: ServiceProcess
    receiver: Receiver
    provider: str
    settings: Path
    upstream: BillingUpstream

    def url(self, path: str = "/") -> str:
        """Return the address of a page."""
        return f"{self.service.address}{path}"


@contextmanager
def started(
    folder: Path, settings: str, provider: str, upstream: str = ""
) -> Iterator[ServiceProcess]:
    """Run a service with settings in which `{provider}` and `{key}` stand for what slots use.

    `{upstream}` stands for where models answer. It is given with its first token.
    """
    key, path = folder / "key", settings_in(folder)
    key.write_text(KEY)
    key.chmod(0o600)
    filled = settings.replace("{provider}", provider).replace("{key}", str(key))
    path.write_text(filled.replace("{upstream}", upstream))
    with (
        patch.dict(os.environ, {MODEL_KEY: KEY}),
        running_service(folder, "--config", str(path)) as service,
    ):
        service.token = (folder / "data/token").read_text().strip()
        yield service


def settings_in(folder: Path) -> Path:
    """Return the file in which a service that was started there has its settings."""
    return folder / "headgate.toml"


@contextmanager
def live_service(folder: Path) -> Iterator[Live]:
    """Run a service with everything that a page can show."""
    with ExitStack() as stack:
        receiver = stack.enter_context(running_receiver())
        provider = stack.enter_context(fake_provider())
        upstream = stack.enter_context(upstream_in_thread())
        models = upstream.openai_url
        service = stack.enter_context(started(folder, SETTINGS, provider, models))
        yield Live(service, receiver, provider, settings_in(folder), upstream)
