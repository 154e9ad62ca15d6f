"""The files that pages load: those that were vendored, unchanged, and kept by browsers for good."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from dashboard.browser import Browser, serving
from headgate.dashboard.static_files import OWN, PREFIX, VENDORED, StaticFiles

FOLDER = Path(__file__).parents[2] / "src/headgate/dashboard/static"
SUMS = FOLDER / "vendor/SHA256SUMS"


def test_everything_vendored_is_what_its_checksum_says_and_has_its_licence() -> None:
    lines = [line.split("  ") for line in SUMS.read_text().splitlines()]
    listed = {name: digest for digest, name in lines}
    found = {path.name for path in SUMS.parent.iterdir()} - {SUMS.name}
    assert set(listed) == found
    for name, digest in listed.items():
        assert hashlib.sha256((SUMS.parent / name).read_bytes()).hexdigest() == digest
    assert {name for name in found if name.startswith("LICENSE.")} == {
        "LICENSE.htmx",
        "LICENSE.htmx-ext-sse",
        "LICENSE.uplot",
    }


def test_every_file_is_served_and_every_served_file_is_there() -> None:
    own = {path.name for path in FOLDER.iterdir() if path.is_file()}
    vendored = {path.name for path in SUMS.parent.iterdir() if path.suffix in (".js", ".css")}
    assert (set(OWN), set(VENDORED)) == (own, vendored)


@pytest.mark.parametrize("name", OWN)
def test_no_file_of_ours_loads_anything_from_elsewhere_or_makes_code_of_text(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|\beval\(|new Function", text)
    assert "innerHTML" not in text


async def test_a_named_file_is_kept_for_good_and_one_without_its_digest_is_not(
    tmp_path: Path,
) -> None:
    url = StaticFiles().url("headgate.css")
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        named = await browser.get(url)
        plain = await browser.get(f"{PREFIX}headgate.css")
        tag = named.headers["etag"]
        again = await browser.get(f"{PREFIX}headgate.css", if_none_match=tag)
    assert named.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert plain.headers["cache-control"] == "no-cache"
    assert (again.status, again.body) == (304, b"")
    assert named.headers["content-type"] == "text/css; charset=utf-8"
    assert named.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["..%2F__init__.py", "vendor%2FSHA256SUMS", "none.js", "%00"])
async def test_nothing_else_of_the_package_is_served(name: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        assert (await Browser(app).get(f"{PREFIX}{name}")).status == 404


async def test_files_are_served_before_a_login(tmp_path: Path) -> None:
    async with serving(tmp_path, "[auth]\nrequired = true\n") as (_, app):
        assert (await Browser(app).get(f"{PREFIX}headgate.css")).status == 200
        icon = await Browser(app).get("/favicon.ico")
    assert (icon.status, icon.headers["content-type"]) == (200, "image/svg+xml")
