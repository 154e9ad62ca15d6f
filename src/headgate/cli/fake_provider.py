"""`headgate fake-provider`: a provider for trying the gateway and key slots without a real key."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click
import msgspec

from headgate.cli.connection import json_option
from headgate.errors import InvalidSettingError

if TYPE_CHECKING:
    from headgate.testing import FakeProvider


DEFAULT_PORT = 7430
KEY_VARIABLE = "FAKE_KEY"
WINDOW_MINUTES = 300.0
MAX_WINDOW_MINUTES = 30 * 1440
MAX_LATENCY_MS = 3_600_000


class FakeStarted(msgspec.Struct, kw_only=True, rename="camel"):
    """A fake provider that serves, and the settings of a slot that asks it."""

    address: str
    settings: str


@click.command(
    "fake-provider",
    epilog="""\b
Examples:
  headgate fake-provider
  headgate fake-provider --window-minutes 2 --percent 40 --warm
  headgate fake-provider --port 0 --json
""",
)
@click.option(
    "--port",
    metavar="N",
    type=int,
    default=DEFAULT_PORT,
    show_default=True,
    help="The port to serve on; 0 picks a free one.",
)
@click.option(
    "--window-minutes",
    metavar="N",
    type=click.FloatRange(0, MAX_WINDOW_MINUTES, min_open=True),
    default=WINDOW_MINUTES,
    show_default=True,
    help="How long a quota window stays open.",
)
@click.option(
    "--percent",
    metavar="P",
    type=click.FloatRange(0, 100),
    default=0.0,
    show_default=True,
    help="How much of the quota is used when a window opens.",
)
@click.option(
    "--latency-ms",
    metavar="N",
    type=click.IntRange(0, MAX_LATENCY_MS),
    default=0,
    show_default=True,
    help="How long each answer takes.",
)
@click.option(
    "--cold/--warm", "is_cold", default=True, help="Start without an open window, or with one."
)
@click.option("--credits", "has_credits", is_flag=True, help="Report CREDIT_LIMIT rows.")
@click.option("--key", metavar="TEXT", help="Accept only this key.  [default: any]")
@json_option
def fake_provider(
    *,
    port: int,
    window_minutes: float,
    percent: float,
    latency_ms: int,
    is_cold: bool,
    has_credits: bool,
    key: str | None,
    as_json: bool,
) -> None:
    """Start a fake provider to try the gateway and key slots with.

    It speaks OpenAI's and Anthropic's protocols. As with a subscription, no quota window is open
    until a request opens one. It serves only this machine. Ctrl-C stops it.
    """
    for name, number in (("--window-minutes", window_minutes), ("--percent", percent)):
        if math.isnan(number):
            raise InvalidSettingError(name, "must be a number")
    # A list of commands loads none of this.
    import asyncio  # noqa: PLC0415

    from headgate.testing import FakeProvider  # noqa: PLC0415

    provider = FakeProvider(
        port=port,
        window_minutes=window_minutes,
        percent=percent,
        latency_ms=latency_ms,
        is_warm=not is_cold,
        has_credits=has_credits,
        key=key,
    )
    asyncio.run(_serve(provider, has_own_key=key is not None, as_json=as_json))


async def _serve(provider: FakeProvider, *, has_own_key: bool, as_json: bool) -> None:
    import asyncio  # noqa: PLC0415
    import signal  # noqa: PLC0415

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with provider:
        settings = slot_settings(provider.address)
        if as_json:
            started = FakeStarted(address=provider.address, settings=settings)
            click.echo(msgspec.json.encode(started).decode())
        else:
            click.echo(_welcome(provider.address, settings, has_own_key=has_own_key))
        await stopping.wait()


def slot_settings(address: str) -> str:
    """Return the settings of a slot that asks a fake provider."""
    return f"""\
[[slots]]
name = "fake"
provider = "zai"
base_url = "{address}"
key_env = "{KEY_VARIABLE}"
wake_modes = ["after_reset"]
poll_interval_minutes = 1
"""


def _welcome(address: str, settings: str, *, has_own_key: bool) -> str:
    key = "what-you-gave-with-key" if has_own_key else "any-text"
    return f"""\
a fake provider serves {address}; Ctrl-C ends it

To try the gateway, put this into headgate.toml and run headgate up:

[upstreams.openai]
kind = "openai"
base_url = "{address}/v1"
key_env = "{KEY_VARIABLE}"

[upstreams.anthropic]
kind = "anthropic"
base_url = "{address}"
key_env = "{KEY_VARIABLE}"

To try key slots, put this there and run headgate slot run --config headgate.toml:

{settings}
Both read the key from the environment: export {KEY_VARIABLE}={key}

Make it fail:

  curl -s {address}/fake/next -d '{{"kind": "429", "retryAfter": 120, "times": 2}}'
  curl -s {address}/fake/window -d '{{"percent": 100}}'
  curl -s {address}/fake/state"""
