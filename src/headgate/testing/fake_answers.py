"""How a fake provider words its answers: as z.ai does, as Anthropic and OpenAI do, and plainly."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Literal

import msgspec

from headgate.testing.fake_script import HUGE_BODY_BYTES, FakeStep
from headgate.testing.fake_window import FULL_PERCENT, FakeWindow

Dialect = Literal["zai", "anthropic", "openai", "plain"]

TOKENS_PER_WINDOW = 1_000_000
WEEK_SECONDS = 7 * 86_400.0
MONTH_SECONDS = 30 * 86_400.0
_BEIJING = timezone(timedelta(hours=8))
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
_CODES = {"exhausted": 1316, "weekly": 1310}
_TOO_MANY = 429


class FakeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer over HTTP."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = {}


def json_answer(
    document: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> FakeAnswer:
    """Return an answer whose body is JSON."""
    return FakeAnswer(status=status, body=msgspec.json.encode(document), headers=headers or {})


def quota_answer(
    window: FakeWindow, *, started_at: float, now: float, has_credits: bool
) -> FakeAnswer:
    """Return what z.ai says of a key: a row that drives wakes, and one that does not."""
    limits = _credit_rows(window, started_at, now) if has_credits else _rows(window, started_at)
    data = {"level": "pro", "limits": limits}
    return json_answer({"code": 200, "msg": "Operation successful", "success": True, "data": data})


def plain_answer(window: FakeWindow) -> FakeAnswer:
    """Return the quota as an address of one's own might tell it."""
    resets_at = window.resets_at
    told = None if resets_at is None else datetime.fromtimestamp(resets_at, UTC).isoformat()
    quota = {"percent": window.percent, "used": _used(window), "limit": TOKENS_PER_WINDOW}
    return json_answer({"quota": {**quota, "resetsAt": told}})


def completion_answer(window: FakeWindow, dialect: Dialect, *, now: float) -> FakeAnswer:
    """Return the answer to a request that was carried out."""
    headers = limit_headers(window, dialect, now=now)
    if dialect == "anthropic":
        content = [{"type": "text", "text": "Hi"}]
        usage = {"input_tokens": 8, "output_tokens": 1}
        message = {"type": "message", "role": "assistant", "content": content, "usage": usage}
        return json_answer(message, headers=headers)
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}}
    usage = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
    return json_answer({"choices": [choice], "usage": usage}, headers=headers)


def used_up_answer(
    window: FakeWindow,
    dialect: Dialect,
    *,
    now: float,
    is_weekly: bool = False,
    message: str | None = None,
) -> FakeAnswer:
    """Return the refusal of a key whose window is used up."""
    resets_at = now + WEEK_SECONDS if is_weekly else window.resets_at or now + window.seconds
    retry_after = {"retry-after": str(max(round(resets_at - now), 0))}
    if dialect == "openai":
        error = {"code": "insufficient_quota", "message": message or "You exceeded your quota."}
        return json_answer({"error": error}, status=_TOO_MANY)
    if dialect == "anthropic":
        error = {"type": "rate_limit_error", "message": message or "This plan's limit is reached."}
        headers = {**_unified(resets_at, FULL_PERCENT, "rejected"), **retry_after}
        return json_answer({"type": "error", "error": error}, status=_TOO_MANY, headers=headers)
    until = datetime.fromtimestamp(resets_at, _BEIJING).strftime(_TIME_FORMAT)
    text = message or f"Usage limit reached. Your limit will reset at {until}"
    code = _CODES["weekly" if is_weekly else "exhausted"]
    return json_answer({"error": {"code": str(code), "message": text}}, status=_TOO_MANY)


def limit_headers(window: FakeWindow, dialect: Dialect, *, now: float) -> dict[str, str]:
    """Return the rate-limit headers of a dialect; some have none."""
    left = str(TOKENS_PER_WINDOW - _used(window))
    resets_at = window.resets_at or now
    if dialect == "anthropic":
        return {
            **_unified(resets_at, window.percent, "allowed"),
            "anthropic-ratelimit-tokens-limit": str(TOKENS_PER_WINDOW),
            "anthropic-ratelimit-tokens-remaining": left,
            "anthropic-ratelimit-tokens-reset": _rfc3339(now + 60),
        }
    if dialect == "openai":
        seconds = max(round(resets_at - now), 0)
        return {
            "x-ratelimit-limit-tokens": str(TOKENS_PER_WINDOW),
            "x-ratelimit-remaining-tokens": left,
            "x-ratelimit-reset-tokens": f"{seconds // 60}m{seconds % 60}s",
        }
    return {}


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> FakeAnswer:
    """Return a refusal, in the shape that z.ai gives it."""
    return json_answer(
        {"code": status, "msg": message, "success": False}, status=status, headers=headers
    )


def scripted_answer(
    step: FakeStep, window: FakeWindow, dialect: Dialect, *, now: float
) -> FakeAnswer:
    """Return the answer of a step."""
    message = step.message or f"scripted {step.kind}"
    match step.kind:
        case "exhausted" | "weekly":
            is_weekly = step.kind == "weekly"
            return used_up_answer(
                window, dialect, now=now, is_weekly=is_weekly, message=step.message
            )
        case "garbage" | "wrong-shape" | "huge":
            return _nonsense(step.kind, message)
        case "redirect":
            location = f"https://login.example.com/{message.replace(' ', '-')}?key=secret"
            return FakeAnswer(status=302, headers={"location": location})
        case _:
            asked = step.retry_after
            headers = {} if asked is None else {"retry-after": str(asked)}
            return refusal(int(step.kind), message, headers)


def _nonsense(kind: Literal["garbage", "wrong-shape", "huge"], message: str) -> FakeAnswer:
    if kind == "garbage":
        return FakeAnswer(body=f"<html>{message}</html>".encode())
    if kind == "huge":
        return json_answer({"data": message + "x" * HUGE_BODY_BYTES})
    return json_answer({"code": 200, "success": True, "data": {"limits": message}})


def _rows(window: FakeWindow, started_at: float) -> list[dict[str, object]]:
    month = {
        "type": "TIME_LIMIT",
        "unit": 5,
        "number": 1,
        "usage": 1000,
        "currentValue": 10,
        "remaining": 990,
        "percentage": 1,
        "nextResetTime": _ms(started_at + MONTH_SECONDS),
        "usageDetails": [{"modelCode": "search-prime", "usage": 10}],
    }
    return [month, _window_row("TOKENS_LIMIT", window)]


def _credit_rows(window: FakeWindow, started_at: float, now: float) -> list[dict[str, object]]:
    weeks = int((now - started_at) // WEEK_SECONDS) + 1
    week = {
        "type": "CREDIT_LIMIT",
        "unit": 6,
        "number": 1,
        "usage": 140_000,
        "currentValue": 1_400 * window.opened,
        "percentage": min(window.opened, FULL_PERCENT),
        "nextResetTime": _ms(started_at + weeks * WEEK_SECONDS),
    }
    return [_window_row("CREDIT_LIMIT", window), week]


def _window_row(row_type: str, window: FakeWindow) -> dict[str, object]:
    number = max(round(window.seconds / 3_600), 1)
    row: dict[str, object] = {"type": row_type, "unit": 3, "number": number}
    row["percentage"] = round(window.percent, 2)
    resets_at = window.resets_at
    return row if resets_at is None else {**row, "nextResetTime": _ms(resets_at)}


def _unified(resets_at: float, percent: float, status: str) -> dict[str, str]:
    prefix = "anthropic-ratelimit-unified"
    return {
        f"{prefix}-status": status,
        f"{prefix}-reset": str(round(resets_at)),
        f"{prefix}-representative-claim": "five_hour",
        f"{prefix}-5h-status": status,
        f"{prefix}-5h-utilization": f"{percent / FULL_PERCENT:.4f}",
        f"{prefix}-5h-reset": str(round(resets_at)),
    }


def _used(window: FakeWindow) -> int:
    return round(TOKENS_PER_WINDOW * window.percent / FULL_PERCENT)


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _ms(seconds: float) -> int:
    return round(seconds * 1_000)
