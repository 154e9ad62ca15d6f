"""The files that pages load: read once, compressed once, and named by their content.

An address carries the digest of its file, so a browser may keep the file for good and asks for
another as soon as the service has one. Rule: what is served is what lies in the package; nothing in
a request becomes a part of a path.
"""

from __future__ import annotations

import gzip
import hashlib
from importlib.resources import files
from typing import NamedTuple

from headgate.api.errors import ApiError
from headgate.api.http.response import Headers, Response
from headgate.dashboard.page import View, takes_gzip

VENDORED = (
    "htmx-2.0.11.min.js",
    "htmx-ext-sse-2.2.4.min.js",
    "uplot-1.6.32.iife.min.js",
    "uplot-1.6.32.min.css",
)
OWN = (
    *("headgate.css", "pages.css", "favicon.svg"),
    *("live_stream.js", "live_regions.js", "outage.js", "charts.js", "countdown.js", "times.js"),
    "headgate.js",
)

PREFIX = "/ui/static/"
OK = 200
NOT_MODIFIED = 304
DIGEST_LENGTH = 12
KEPT_FOR_GOOD = b"public, max-age=31536000, immutable"
ASKED_FOR_AGAIN = b"no-cache"

_TYPES = {
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}


class StaticFile(NamedTuple):
    """A file as it is sent."""

    content: bytes
    compressed: bytes
    content_type: bytes
    digest: str


class StaticFiles:
    """All files by their names."""

    def __init__(self) -> None:
        self._files = {name: _read(name) for name in (*OWN, *VENDORED)}

    def url(self, name: str) -> str:
        """Return the address of a file as it is now."""
        return f"{PREFIX}{name}?v={self._files[name].digest}"

    async def show(self, view: View, name: str) -> Response:
        """Answer with a file, compressed if the browser takes that."""
        file = self._files.get(name)
        if file is None:
            raise ApiError("not_found", "there is no such file")
        request = view.request
        is_named = request.query().get("v") == file.digest
        tag = f'"{file.digest}"'.encode()
        headers: Headers = (
            (b"cache-control", KEPT_FOR_GOOD if is_named else ASKED_FOR_AGAIN),
            (b"etag", tag),
            (b"vary", b"accept-encoding"),
            (b"x-content-type-options", b"nosniff"),
        )
        if request.header(b"if-none-match") == tag:
            return Response(NOT_MODIFIED, b"", headers)
        if takes_gzip(request.header(b"accept-encoding")):
            headers += ((b"content-encoding", b"gzip"),)
            return Response(OK, file.compressed, headers, file.content_type)
        return Response(OK, file.content, headers, file.content_type)

    async def show_icon(self, view: View, _: str) -> Response:
        """Answer a browser that shows something else than a page, and looks for its icon."""
        return await self.show(view, "favicon.svg")


def _read(name: str) -> StaticFile:
    folder = files("headgate.dashboard") / "static"
    place = folder / "vendor" / name if name in VENDORED else folder / name
    content = place.read_bytes()
    return StaticFile(
        content,
        gzip.compress(content, mtime=0),
        _TYPES["." + name.rpartition(".")[2]],
        hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH],
    )
