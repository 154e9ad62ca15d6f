"""The routes of webhooks: what was told to whom, once more, a ping, and the signing secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable

from headgate.api.api import Api, Route, actor_of
from headgate.api.errors import ApiError, invalid_field
from headgate.api.http.request import Request, read_limit
from headgate.api.http.response import Response, json_response
from headgate.api.schema.admin import (
    DeliveryBody,
    DeliveryListBody,
    DeliveryTryBody,
    PingBody,
    PingedBody,
    SecretBody,
    SecretListBody,
)
from headgate.api.submission import MAX_URL_LENGTH, check_unknown, excerpt, read_body
from headgate.core.task_view import exact_moment, moment
from headgate.engine.webhooks import Webhooks
from headgate.storage.audit import AuditEntry
from headgate.storage.deliveries import (
    Delivery,
    DeliveryQuery,
    DeliveryState,
    DeliveryTry,
    NothingLeft,
    Secret,
)

OK = 200
ACCEPTED = 202
QUERY_FIELDS = ("state", "task", "limit", "cursor")

_FOR_TOKENS_ALONE = (
    "a secret is shown to whoever has a token, also where nothing else needs one; make one with"
    " 'headgate token create NAME --permission admin', and send it"
)
_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
_SECRET = ((b"cache-control", b"no-store"),)


async def list_webhooks(api: Api, request: Request, _: str) -> Response:
    """Answer with one page of webhooks, newest first."""
    return json_response(OK, await webhook_list(api, read_query(request.query())))


async def webhook_list(api: Api, query: DeliveryQuery) -> DeliveryListBody:
    """Return one page of webhooks, newest first."""
    page = await _webhooks(api).deliveries.find(query)
    bodies = [_body(delivery) for delivery in page.deliveries]
    return DeliveryListBody(webhooks=bodies, count=len(bodies), next_cursor=page.next_before)


async def show_webhook(api: Api, _: Request, delivery_id: str) -> Response:
    """Answer with what is known of a webhook."""
    return json_response(OK, await one_webhook(api, delivery_id))


async def one_webhook(api: Api, delivery_id: str) -> DeliveryBody:
    """Return what is known of a webhook."""
    delivery = await _webhooks(api).deliveries.get(_known_form(delivery_id))
    if delivery is None:
        raise _not_found()
    return _body(delivery)


async def redeliver(api: Api, request: Request, delivery_id: str) -> Response:
    """Start over with a webhook, whatever became of it before."""
    return json_response(ACCEPTED, await redelivered(api, request, delivery_id))


async def redelivered(api: Api, request: Request, delivery_id: str) -> DeliveryBody:
    """Start over with a webhook, and return it."""
    entry = _entry(request, "webhook.redeliver", delivery_id)
    answer = await _webhooks(api).redeliver(_known_form(delivery_id), entry)
    if answer is None:
        raise _not_found()
    if isinstance(answer, NothingLeft):
        message = "it has arrived and its task is not kept any more, so there is nothing to send"
        raise ApiError("conflict", message)
    return _body(answer)


async def ping(api: Api, request: Request, _: str) -> Response:
    """Send a signed message to an address now, and answer with what happened."""
    url = read_body(await request.json_body(), PingBody).url
    return json_response(OK, await pinged(api, request, url))


async def pinged(api: Api, request: Request, url: str) -> PingedBody:
    """Send a signed message to an address now, and return what happened."""
    webhooks = _webhooks(api)
    if not url or len(url) > MAX_URL_LENGTH or not url.isprintable():
        raise invalid_field("url", f"must be an address of 1 to {MAX_URL_LENGTH} characters")
    report = await webhooks.ping(url)
    if report.is_final and report.status is None:
        raise invalid_field("url", report.error or "cannot be used")
    await api.record(request, "webhook.ping")
    return PingedBody(delivered=report.has_arrived, status=report.status, error=report.error)


async def show_secrets(api: Api, request: Request, _: str) -> Response:
    """Answer with the secrets that sign now, to nobody who has no token."""
    if not request.caller.token_id:
        raise ApiError("unauthorized", _FOR_TOKENS_ALONE)
    entry = AuditEntry(actor=actor_of(request), action="webhook.secret.show", is_read=True)
    secrets = await signing_secrets(api, entry)
    return json_response(OK, _secrets(secrets), _SECRET)


async def signing_secrets(api: Api, entry: AuditEntry | None = None) -> tuple[Secret, ...]:
    """Return the secrets that sign now; an entry notes who gets to see them."""
    return await _webhooks(api).deliveries.secrets(entry)


async def rotate_secret(api: Api, request: Request, _: str) -> Response:
    """Make a new secret; the one before signs too for a day."""
    return json_response(OK, _secrets(await rotated(api, request)), _SECRET)


async def rotated(api: Api, request: Request) -> tuple[Secret, ...]:
    """Make a new secret, and return those that sign now, the newest first."""
    return await _webhooks(api).deliveries.rotate(_entry(request, "webhook.secret.rotate"))


def read_query(given: dict[str, str]) -> DeliveryQuery:
    """Read the filter and the page of a list."""
    check_unknown(given, QUERY_FIELDS)
    for name in ("task", "cursor"):
        if given.get(name) and _ID.fullmatch(given[name]) is None:
            raise invalid_field(name, f"'{excerpt(given[name])}' is not an id")
    return DeliveryQuery(
        state=_state(given.get("state", "")),
        task_id=given.get("task") or None,
        before=given.get("cursor") or None,
        limit=read_limit(given),
    )


def _state(text: str) -> DeliveryState | None:
    try:
        return DeliveryState(text) if text else None
    except ValueError:
        allowed = ", ".join(state.value for state in DeliveryState)
        raise invalid_field("state", f"'{excerpt(text)}' is none of {allowed}") from None


def _entry(request: Request, action: str, subject: str = "") -> AuditEntry:
    return AuditEntry(actor=actor_of(request), action=action, subject=subject)


def _webhooks(api: Api) -> Webhooks:
    if api.webhooks is None:
        raise ApiError("unavailable", "webhooks are switched off; set webhooks.enabled = true")
    return api.webhooks


def _known_form(delivery_id: str) -> str:
    if _ID.fullmatch(delivery_id) is None:
        raise _not_found()
    return delivery_id


def _not_found() -> ApiError:
    return ApiError("not_found", "there is no such webhook, or not any more")


def _body(delivery: Delivery) -> DeliveryBody:
    return DeliveryBody(
        id=delivery.id,
        event=delivery.event,
        state=delivery.state.value,
        url=delivery.url,
        task_id=delivery.task_id or None,
        tries=delivery.tries,
        created_at=exact_moment(delivery.created_at),
        due_at=moment(delivery.due_at),
        ended_at=moment(delivery.ended_at),
        status=delivery.status,
        error=delivery.error,
        latest_tries=tuple([_try(one) for one in delivery.latest_tries]),
    )


def _try(one: DeliveryTry) -> DeliveryTryBody:
    return DeliveryTryBody(
        at=exact_moment(one.at),
        duration_ms=one.duration_ms,
        status=one.status,
        error=one.error,
        answer=one.answer,
    )


def _secrets(secrets: Iterable[Secret]) -> SecretListBody:
    return SecretListBody(
        secrets=[
            SecretBody(
                secret=secret.secret,
                created_at=exact_moment(secret.created_at),
                ends_at=moment(secret.ends_at),
            )
            for secret in secrets
        ]
    )


ROUTES = (
    Route(
        "GET",
        "/webhooks",
        list_webhooks,
        "list webhooks, newest first",
        responses={200: DeliveryListBody},
        query=QUERY_FIELDS,
        errors=("invalid_field", "unknown_field"),
    ),
    Route(
        "POST",
        "/webhooks/ping",
        ping,
        "send a signed message to an address, and say what happened",
        body=PingBody,
        responses={200: PingedBody},
    ),
    Route(
        "GET",
        "/webhooks/secret",
        show_secrets,
        "show the secrets that sign webhooks",
        responses={200: SecretListBody},
    ),
    Route(
        "POST",
        "/webhooks/secret/rotate",
        rotate_secret,
        "make a new secret; the old one also signs for a day",
        responses={200: SecretListBody},
    ),
    Route(
        "GET",
        "/webhooks/{id}",
        show_webhook,
        "show a webhook",
        responses={200: DeliveryBody},
        errors=("not_found",),
    ),
    Route(
        "POST",
        "/webhooks/{id}/redeliver",
        redeliver,
        "send a webhook again, from its first try on",
        responses={202: DeliveryBody},
        errors=("not_found", "conflict"),
    ),
)
