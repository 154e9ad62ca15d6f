"""One provider and one service for all clients; some of them wait in its queue all the while."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from clients.client_processes import CLIENTS, Client, Mode
from clients.stage import (
    KEYS,
    LINE_MODELS,
    PROJECT,
    SETTINGS,
    WAITS,
    Going,
    Queue,
    Stage,
    ask_line,
    skip_unless_here,
)
from gateway.billing_upstream import BillingUpstream, upstream_in_thread
from service.support import running_service


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name)
def client(request: pytest.FixtureRequest) -> Client:
    """Give each client that runs here, in turn."""
    chosen: Client = request.param
    skip_unless_here(chosen)
    return chosen


@pytest.fixture(scope="session")
def upstream() -> Iterator[BillingUpstream]:
    """Serve a provider that knows five keys, two for each protocol and one for the queue."""
    with upstream_in_thread(*KEYS) as provider:
        yield provider


@pytest.fixture(scope="session")
def stage(upstream: BillingUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Run a service in front of the provider, with two keys for each protocol."""
    folder = tmp_path_factory.mktemp("clients")
    settings = folder / "headgate.toml"
    projects = "".join(PROJECT.format(name=client.name) for client in CLIENTS)
    settings.write_text(SETTINGS.format(url=upstream.url) + projects)
    with pytest.MonkeyPatch.context() as patch:
        for number, key in enumerate(KEYS):
            patch.setenv(f"CLIENTS_KEY_{number}", key)
        with running_service(folder, "--config", str(settings)) as service:
            yield Stage(service, upstream, folder)


@pytest.fixture(scope="session")
def queue(stage: Stage) -> Iterator[Queue]:
    """Start every client behind a call that does not end."""
    blockers = [
        threading.Thread(target=ask_line, args=(stage.service.address, kind), daemon=True)
        for kind in LINE_MODELS
    ]
    for blocker in blockers:
        blocker.start()
    stage.wait_until(lambda: stage.upstream.accounts[KEYS[4]].running == len(blockers))
    waiters: dict[tuple[str, Mode], Going] = {}
    try:
        for client, mode in WAITS:
            if client.why_not() is None:
                model = LINE_MODELS[client.kind]
                prompt = "[[say served at last]]"
                waiters[client.name, mode] = stage.start(client, prompt, mode=mode, model=model)
        seen: set[str] = set()

        def all_wait() -> bool:
            """Tell whether each was seen; what has ended fails in its own test."""
            seen.update(call["agentId"] for call in stage.calls(state="waiting"))
            return all(
                waiter.name in seen or waiter.process.has_ended() for waiter in waiters.values()
            )

        stage.wait_until(all_wait, 60)
        yield Queue(stage, waiters)
    finally:
        stage.upstream.releases.add("line")
        for waiter in waiters.values():
            waiter.process.kill()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start those that wait first, and look at them last."""
    items.sort(key=lambda item: "queue" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session", autouse=True)
def started_early(request: pytest.FixtureRequest) -> None:
    """Let the queue begin with the first test, if any test looks at it."""
    items = request.session.items
    if any("queue" in getattr(item, "fixturenames", ()) for item in items):
        request.getfixturevalue("queue")
