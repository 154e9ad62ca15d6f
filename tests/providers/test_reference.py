"""The page of providers says everything: addresses, failures, forms of times, kinds of the fake."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_args

from headgate.core.slots.quota import EXHAUSTION_CODES, QuotaFailureKind
from headgate.providers.endpoints import DEFAULTS
from headgate.providers.quota_apis import reset_time
from headgate.testing.fake_provider import QUOTA_PATHS, REQUEST_PATHS, FakeKind

PAGE = (Path(__file__).parents[2] / "docs/reference/providers.md").read_text()


def test_every_provider_and_what_is_usual_for_it_is_there() -> None:
    for name, usual in DEFAULTS.items():
        assert f"| `{name}` |" in PAGE
        for text in (usual.base_url, usual.quota_path, usual.request_path):
            assert text is None or text in PAGE


def test_every_kind_of_failure_is_there() -> None:
    for kind in QuotaFailureKind:
        assert f"| `{kind.value}` |" in PAGE
    assert {1308, 1310, *range(1316, 1322)} == EXHAUSTION_CODES


def test_times_are_read_as_the_page_says() -> None:
    table = inspect.getdoc(reset_time) or ""
    forms = {line.split("|")[1] for line in table.splitlines() if line.startswith("| ")}
    assert {form for form in forms if f"|{form}|" not in PAGE} == set()


def test_everything_that_the_fake_provider_does_is_there() -> None:
    for kind in get_args(FakeKind):
        assert f"`{kind}`" in PAGE
    for path in (*QUOTA_PATHS, *REQUEST_PATHS):
        assert f" {path}`" in PAGE
