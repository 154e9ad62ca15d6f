"""Where a service is and who asks: from arguments, or from the environment."""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import urlsplit

from headgate.errors import InvalidSettingError

DEFAULT_URL = "http://127.0.0.1:7420"
URL_VARIABLE = "HEADGATE_URL"
TOKEN_VARIABLE = "HEADGATE_TOKEN"  # noqa: S105 - the name of a variable

_PORTS = {"http": 80, "https": 443}
_TOKEN = re.compile(r"[\x21-\x7e]{1,512}")
_LOOPBACK = re.compile(r"localhost|127(\.[0-9]{1,3}){3}|::1")


class Address(NamedTuple):
    """The parts of a service's URL; `prefix` is the path that its routes lie under."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @property
    def url(self) -> str:
        """The address as people write it."""
        return f"{self.scheme}://{self.netloc}{self.prefix}"

    @property
    def netloc(self) -> str:
        """Host and port, as a Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it is on this machine, by what it says; no name is looked up."""
        return _LOOPBACK.fullmatch(self.host) is not None


def address_of(url: str | None) -> Address:
    """Return the address of an argument, of HEADGATE_URL, or the default one."""
    given = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        raise _bad_url("is not an address") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise _bad_url("must start with http:// or https:// and name a host")
    if parts.username is not None or parts.query or parts.fragment:
        raise _bad_url("must have no user name, query or fragment; give the token apart from it")
    return Address(
        parts.scheme, parts.hostname, port or _PORTS[parts.scheme], parts.path.rstrip("/")
    )


def token_of(token: str | None) -> str | None:
    """Return the token of an argument or of HEADGATE_TOKEN; None where there is none."""
    given = (token or os.environ.get(TOKEN_VARIABLE) or "").strip()
    if given and _TOKEN.fullmatch(given) is None:
        raise InvalidSettingError("token", "must be one word of printable ASCII characters")
    return given or None


def headers_of(token: str | None) -> dict[str, str]:
    """Return what every request says of its sender."""
    headers = {"user-agent": "headgate", "accept": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    return headers


def _bad_url(problem: str) -> InvalidSettingError:
    return InvalidSettingError("url", problem)
