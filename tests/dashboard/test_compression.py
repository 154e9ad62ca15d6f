"""Who gets pages, figures and files compressed: those who say that they take it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboard.browser import Browser, serving
from headgate.dashboard.page import takes_gzip
from headgate.dashboard.static_files import PREFIX

ADDRESSES = ("/ui/tasks", f"{PREFIX}headgate.css", "/ui/history")


@pytest.mark.parametrize(
    ("accepted", "is_taken"),
    [
        (b"", False),
        (b"br, zstd", False),
        (b"gzip", True),
        (b"GZIP", True),
        (b"deflate, x-gzip", True),
        (b"br;q=1.0,  gzip ; q=0.5", True),
        (b"gzip;q=0", False),
        (b"gzip; Q=0.000, *", False),
        (b"*", True),
        (b"*;q=0", False),
        (b"identity;q=1, *;q=0.1", True),
        (b"gzip;q=much", False),
        (b"gzip;q=nan", False),
        (b"gzipped", False),
        (b"br;x=gzip", False),
    ],
)
def test_a_weight_of_nothing_is_a_no_and_the_case_does_not_matter(
    accepted: bytes, is_taken: bool
) -> None:
    assert takes_gzip(accepted) is is_taken


@pytest.mark.parametrize("url", ADDRESSES)
async def test_everything_that_is_compressed_asks_in_the_same_way(url: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        refused = await Browser(app).get(url, accept_encoding="gzip;q=0, br")
        taken = await Browser(app).get(url, accept_encoding="GZip")
    assert "content-encoding" not in refused.headers
    assert refused.headers["vary"] == "accept-encoding"
    if len(refused.body) > 1_000:
        assert taken.headers["content-encoding"] == "gzip"
