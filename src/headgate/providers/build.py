"""From a place to the provider that asks there."""

from __future__ import annotations

import time
from collections.abc import Callable

from headgate.errors import InvalidSettingError
from headgate.provider import Provider
from headgate.providers.slot_places import (
    ANTHROPIC,
    HTTP_JSON,
    ZAI,
    ProviderPlace,
    check_place,
    settled,
)


def build_provider(
    provider_name: str,
    place: ProviderPlace,
    *,
    setting: str = "slots",
    clock: Callable[[], float] = time.time,
) -> Provider:
    """Return the provider of a slot; it opens no connection before it is asked.

    What is wrong with the place is an `InvalidSettingError` under the name `setting`.
    """
    check_place(provider_name, place, setting=setting)
    try:
        return _built(provider_name, settled(provider_name, place), clock)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "httpx2":
            raise
        field = f"{setting}.provider"
        problem = "needs the package httpx2, which is not installed"
        advice = "run pip install 'headgate[server]'"
        raise InvalidSettingError(field, f"{problem}; {advice}") from None


def _built(provider_name: str, place: ProviderPlace, clock: Callable[[], float]) -> Provider:
    # What sends is an extra, and is loaded when there is something to send.
    from headgate.providers import anthropic_quota, openai_quota  # noqa: PLC0415
    from headgate.providers.header_quota import HeaderQuotaProvider  # noqa: PLC0415
    from headgate.providers.http_json import HttpJsonProvider  # noqa: PLC0415
    from headgate.providers.zai import ZaiProvider  # noqa: PLC0415

    if provider_name == ZAI:
        return ZaiProvider(place, clock=clock)
    if provider_name == HTTP_JSON:
        return HttpJsonProvider(place, clock=clock)
    dialect = anthropic_quota.DIALECT if provider_name == ANTHROPIC else openai_quota.DIALECT
    return HeaderQuotaProvider(dialect, place, clock=clock)
