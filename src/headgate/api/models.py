"""The routes of models: which names the gateway knows, where they go, and what they cost.

They are told from the settings alone: no upstream is asked. What an upstream says that it has is at
`GET /v1/models`, in the words of its protocol.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from headgate.api.api import Api, Route
from headgate.api.errors import ApiError
from headgate.api.http.request import Request
from headgate.api.http.response import Response, json_response
from headgate.api.schema.admin import ModelBody, ModelListBody
from headgate.api.submission import excerpt
from headgate.config import Settings
from headgate.core.money import plain_usd
from headgate.providers.prices import PriceList, UnknownPriceError

OK = 200
PRICED_TOKENS = 10_000
"""How many tokens are priced to tell what a million costs: fewer than raise any price."""

ANY = "*"
"""Upstreams without `models` take every name, each from clients of its own protocol."""

_MILLION = 1_000_000


async def list_models(api: Api, _: Request, __: str) -> Response:
    """Answer with the models that the settings name, and with `*` for what takes every other."""
    settings = api.config.settings
    names = dict.fromkeys(settings.models)
    for upstream in settings.all_upstreams.values():
        names |= dict.fromkeys(upstream.models)
    bodies = [_body(api.prices, settings, name, _route(settings, name)) for name in names]
    others = [f"{name}/{ANY}" for name, one in settings.all_upstreams.items() if not one.models]
    if others and ANY not in names:
        bodies.append(ModelBody(name=ANY, route=others, is_alias=False))
    return json_response(OK, ModelListBody(models=bodies))


async def show_model(api: Api, _: Request, name: str) -> Response:
    """Answer with a model: any name that calls may have, whether the settings name it or not."""
    settings = api.config.settings
    route = _route(settings, name)
    if not route:
        raise ApiError("not_found", f"model '{excerpt(name)}' goes to no upstream")
    return json_response(OK, _body(api.prices, settings, name, route))


def _route(settings: Settings, name: str) -> list[str]:
    """Return the upstream models that a name stands for, as `upstream/model`."""
    alias = settings.models.get(name)
    if alias is not None:
        return [f"{upstream}/{model}" for upstream, model in alias.members]
    upstreams = settings.all_upstreams
    named = [
        f"{upstream}/{name}"
        for upstream, one in upstreams.items()
        if any(name == pattern or fnmatchcase(name, pattern) for pattern in one.models)
    ]
    prefix, _, rest = name.partition("/")
    if not named and rest and prefix in upstreams:
        return [name]
    # Those without a list of models take every name, each from clients of its own protocol.
    return named or [f"{one}/{name}" for one in upstreams if not upstreams[one].models]


def _body(prices: PriceList, settings: Settings, name: str, route: list[str]) -> ModelBody:
    models = [member.partition("/")[2] for member in route]
    return ModelBody(
        name=name,
        route=route,
        is_alias=name in settings.models,
        input_usd_per_million=_price(prices, models, input_tokens=PRICED_TOKENS),
        output_usd_per_million=_price(prices, models, output_tokens=PRICED_TOKENS),
    )


def _price(
    prices: PriceList, models: list[str], *, input_tokens: int = 0, output_tokens: int = 0
) -> str | None:
    """Return what a million tokens of the first model cost; None if nobody knows."""
    if not models:
        return None
    try:
        cost = prices.cost(models[0], input_tokens=input_tokens, output_tokens=output_tokens)
    except UnknownPriceError:
        return None
    return plain_usd(cost.micro_usd * (_MILLION // PRICED_TOKENS))


ROUTES = (
    Route(
        "GET",
        "/models",
        list_models,
        "list the models that the settings name, where they go and what they cost",
        responses={200: ModelListBody},
        errors=("not_found",),
    ),
    Route(
        "GET",
        "/models/{id}",
        show_model,
        "show where calls for a model go, and what it costs",
        responses={200: ModelBody},
    ),
)
