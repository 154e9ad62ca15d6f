"""Books against bill: what is booked is what was billed, to the token, wherever that was said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.call_load import (
    PRICES,
    PROJECTS,
    CallClient,
    books,
    compare,
    faults,
    in_parallel,
    price_of,
    project_of,
    settled,
)
from gateway.gateway_service import gateway_service

CLIENTS = 50
CALLS = 12
SETTINGS = """
[projects.strict]
reserve = "strict"
[projects.expected]
[projects.open]
[budgets."project:strict"]
limit_usd = "50"
[budgets."project:expected"]
limit_usd = "50"
"""
UPSTREAMS = """
[[slots]]
name = "one"
provider = "openai"
base_url = "{url}"
key_env = "KEY_1"

[[slots]]
name = "two"
provider = "openai"
base_url = "{url}"
key_env = "KEY_2"

[upstreams.anthropic]
kind = "anthropic"
base_url = "{url}"
key_env = "KEY_3"

[upstreams.openai]
kind = "openai"
base_url = "{openai_url}"
slots = ["one", "two"]
"""
KEYS = {"KEY_1": "key-one", "KEY_2": "key-two", "KEY_3": "key-three"}
SCOPES = tuple(f"project:{one}" for one in PROJECTS)


@pytest.mark.parametrize(("seed", "has_escrow"), [(1, True), (2, False)])
@pytest.mark.timeout(120)
def test_the_books_of_random_calls_equal_the_bill(
    tmp_path: Path, seed: int, has_escrow: bool
) -> None:
    async def scenario() -> None:
        async with gateway_service(
            tmp_path,
            SETTINGS + f"[gateway]\nescrow = {str(has_escrow).lower()}\n",
            upstreams=UPSTREAMS,
            environ=KEYS,
            prices=PRICES,
            store=f"sqlite:///{tmp_path}/books.db",
        ) as gateway:
            gateway.upstream.decide = faults(seed, 0.1)
            gateway.upstream.finishes_generating = True
            url = f"http://127.0.0.1:{gateway.port}"
            clients = [CallClient(url, seed * 1_000 + number) for number in range(CLIENTS)]
            await in_parallel(clients, CALLS)
            await gateway.until_idle()
            found = await books(gateway.client)
            result = compare(found, gateway.upstream.bill)
            assert not result.wrong, result.wrong[:3]
            assert not result.below, result.below[:3]
            assert result.exact > 0.7 * result.marks > 300
            assert result.assumed > 5
            assert sum(one.left for one in clients) > 20
            statuses = await settled(gateway.client, SCOPES, 20.0)
            for scope, status in statuses.items():
                assert float(status["reservedUsd"]) == 0.0, (scope, status)
                project = scope.removeprefix("project:")
                bill = [one for one in gateway.upstream.bill if project_of(one) == project]
                spent = float(status["spentUsd"]) + float(status["overrunUsd"])
                assert 1e6 * spent >= sum(map(price_of, bill)) - len(bill)
                assert not gateway.calls.live()

    asyncio.run(scenario())
