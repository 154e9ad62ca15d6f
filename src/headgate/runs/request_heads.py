"""Where requests of steps go, and with which headers: filled from variables, keys among them.

Rule: errors name a header or a variable, and never its value.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.errors import InvalidSettingError
from headgate.http_headers import CARRIAGE, HEADER_NAME, SECRET_NAME, check_header_value
from headgate.runs.variables import Variables
from headgate.workflow.endpoints import PATHS
from headgate.workflow.texts import FilledText
from headgate.workflow.workflow import Endpoint

ANTHROPIC_VERSION = "2023-06-01"


def model_url(endpoint: Endpoint, variables: Variables) -> str:
    """Return where the models of an endpoint are asked."""
    setting = f"config.endpoints.{endpoint.name}.url"
    base = variables.fixed(endpoint.url, setting) or ""
    return base.rstrip("/") + PATHS[endpoint.kind]


def model_headers(endpoint: Endpoint, variables: Variables) -> dict[str, str]:
    """Return the headers that an endpoint wants, the key among them."""
    setting = f"config.endpoints.{endpoint.name}"
    texts = {name: text.parts for name, text in endpoint.headers.items()}
    headers = {"anthropic-version": ANTHROPIC_VERSION} if endpoint.kind == "anthropic" else {}
    headers |= filled_headers(texts, f"{setting}.headers", variables)  # type: ignore[arg-type]
    if endpoint.key is None:
        return headers
    key = variables.fixed(endpoint.key, f"{setting}.key") or ""
    check_header_value(key, f"{setting}.key")
    variables.hide(key, "{key}")
    own = {"x-api-key": key} if endpoint.kind == "anthropic" else {"authorization": f"Bearer {key}"}
    return own | headers


def filled_headers(
    headers: Mapping[str, FilledText], setting: str, variables: Variables
) -> dict[str, str]:
    """Return headers as they are sent; errors name the header, and never its value."""
    filled: dict[str, str] = {}
    for name, text in headers.items():
        check_header_name(name, f"{setting}.{name}")
        value = filled[name.lower()] = variables.filled(text, f"{setting}.{name}")
        check_header_value(value, f"{setting}.{name}")
        if SECRET_NAME.search(name):
            variables.hide(value.rpartition(" ")[2], f"{{{name}}}")
    return filled


def check_header_name(name: str, setting: str) -> None:
    """Refuse a header that cannot be written, or that frames the request."""
    if not HEADER_NAME.fullmatch(name):
        raise InvalidSettingError(setting, "is not the name of a header")
    if name.lower() in CARRIAGE:
        raise InvalidSettingError(setting, "is set for every request; leave it out")
