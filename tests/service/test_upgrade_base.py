"""The earlier versions that `make torture` upgrades from are found, whatever commits are called."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torture.upgrade import CHANGES, Change, NoHistoryError, earlier_commit

from service.support import ROOT

LATEST = Change("tables", "-GCREATE TABLE", "src")
FIRST = Change("tables", "-GCREATE TABLE", "src", is_first=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A history of four commits, of which the second and the fourth change tables."""
    folder = tmp_path / "checkout"
    (folder / "src").mkdir(parents=True)
    git(folder, "init", "--quiet")
    for number, text in enumerate(("", "CREATE TABLE a", "CREATE TABLE a", "CREATE TABLE b")):
        (folder / "src" / "tables.py").write_text(text)
        (folder / "other").write_text(f"{number}")
        git(folder, "add", ".")
        author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        git(folder, *author, "commit", "--quiet", "--message", f"commit {number}")
    return folder


def git(folder: Path, *arguments: str) -> str:
    """Run git, and return what it prints."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.mark.parametrize(("change", "subject"), [(LATEST, "commit 2"), (FIRST, "commit 0")])
def test_the_version_before_a_change_is_its_parent(
    checkout: Path, change: Change, subject: str
) -> None:
    commit = earlier_commit(change, checkout)
    assert commit is not None
    assert git(checkout, "log", "-1", "--format=%s", commit) == subject


def test_a_whole_history_without_the_change_has_no_earlier_version(checkout: Path) -> None:
    assert earlier_commit(Change("other", "-Snowhere", "src"), checkout) is None


def test_a_history_that_is_cut_off_and_no_checkout_are_told_apart(checkout: Path) -> None:
    shallow = checkout.parent / "shallow"
    git(checkout, "clone", "--quiet", "--depth=1", f"file://{checkout}", str(shallow))
    with pytest.raises(NoHistoryError, match="cut off"):
        earlier_commit(FIRST, shallow)
    with pytest.raises(NoHistoryError, match="no git checkout"):
        earlier_commit(FIRST, checkout / "src")


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.title)
def test_the_present_history_has_each_earlier_version(change: Change) -> None:
    try:
        commit = earlier_commit(change)
    except NoHistoryError as error:
        pytest.skip(str(error))
    assert commit is not None
    assert git(ROOT, "ls-tree", "--name-only", commit, "src/headgate/app.py")
