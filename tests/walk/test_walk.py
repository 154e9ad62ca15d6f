"""From the built wheel in an empty environment, the commands of each page, in order."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import click
import pytest

from budgets.servers import running_postgres
from doc_pages import ROOT, blocks_of, name_of
from walk.installed import Installed, install
from walk.walker import steps_of, walking

MOST_SECONDS = 120.0
"""Until the first answer through the gateway, by the clock on the wall from `pip install` on."""

# A page starts up to a hundred processes, one after another, and the first one waits for pip.
pytestmark = pytest.mark.timeout(900)

README = ROOT / "README.md"
GATEWAY = ROOT / "docs/tutorials/gateway.md"
POSTGRESQL = ROOT / "docs/how-to/run-on-postgresql.md"
NEEDS_MORE = {
    "docs/how-to/connect-clients.md": "coding agents from npm: make test-clients runs them",
    "docs/how-to/limit-ci-jobs.md": "a runner of GitHub",
    "docs/how-to/run-as-a-service.md": "systemd",
    "docs/how-to/run-behind-a-proxy.md": "a proxy",
    "docs/how-to/run-in-a-container.md": "a container engine",
    "docs/how-to/run-on-kubernetes.md": "a cluster",
}
"""Pages that nobody can follow with the wheel alone, and what they need beside it."""

PAGES = [
    page
    for page in (
        README,
        *sorted((ROOT / "docs/tutorials").glob("*.md")),
        *sorted((ROOT / "docs/how-to").glob("*.md")),
    )
    if any(steps_of(block) for block in blocks_of(page.read_text()))
]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Give the wheel of this checkout, in an environment that had nothing before."""
    return install(tmp_path_factory.mktemp("installed"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_can_be_followed_with_the_installed_wheel(
    page: Path, installed: Installed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name_of(page) in NEEDS_MORE:
        pytest.skip(f"needs {NEEDS_MORE[name_of(page)]}")
    with ExitStack() as stack:
        more = _server(stack) if page == POSTGRESQL else {}
        walker = stack.enter_context(
            walking(installed, tmp_path, is_checkout=page == README, **more)
        )
        walker.follow(page.read_text())
    if page == GATEWAY:
        assert walker.first_answer_seconds is not None
        total = installed.seconds + walker.first_answer_seconds
        with capsys.disabled():
            click.echo(
                f"first answer through the gateway {total:.1f} s after pip install began: "
                f"pip {installed.seconds:.1f} s, the page {walker.first_answer_seconds:.1f} s; "
                f"pip computed for {installed.cpu_seconds:.1f} s"
            )
        assert total < MOST_SECONDS


def _server(stack: ExitStack) -> Mapping[str, Mapping[str, str]]:
    """Run a server for a page, in place of those that it names."""
    server = stack.enter_context(running_postgres())
    folder = server.socket_path.parent
    hosts = ("db.internal", "db1.internal", "db2.internal")
    programs = {name: str(server.binaries / name) for name in ("createuser", "createdb")}
    return {
        "stand_ins": {
            **dict.fromkeys(hosts, quote(str(folder), safe="")),
            **programs,
            "10.0.0.12": "127.0.0.2",
        },
        "environ": {"PGHOST": str(folder), "PGUSER": "postgres"},
    }


def test_pages_that_are_left_out_exist() -> None:
    assert [name for name in NEEDS_MORE if not (ROOT / name).exists()] == []
