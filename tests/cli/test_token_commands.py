"""`headgate token` and `headgate usage`, on a service that asks for tokens."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.fake_tokens import FakeTokens
from cli.said import Command, Said
from headgate.cli.connection import PREVIOUS, token_lines, write_token
from headgate.cli.main import run
from headgate.storage.sqlite import SqliteTaskStore
from headgate.storage.tokens import Token, read_token
from service.support import ServiceProcess, running_service, wait_until

SETTINGS = """
[auth]
required = true

[targets.model]
kind = "command"
command = ["echo", '{"model": "gpt-4o", "usage": {"prompt_tokens": 1000, "completion_tokens": 0}}']
"""


WRONG = "hg_" + "0" * 12 + "_" + "0" * 48


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "headgate.toml").write_text(SETTINGS)
    with running_service(folder) as process:
        yield process


@pytest.fixture
def data(service: ServiceProcess) -> Path:
    return service.folder / "data"


@pytest.fixture
def headgate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> Said:
        capsys.readouterr()
        code = run(list(arguments))
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return command


def test_the_first_token_is_printed_once_and_in_a_file_of_its_owner(
    service: ServiceProcess, data: Path
) -> None:
    text = (data / "token").read_text().strip()
    assert service.output().count(text) == 1
    assert stat.S_IMODE((data / "token").stat().st_mode) == 0o600
    assert service.ask("GET", "/tasks").status == 401
    assert service.ask("GET", "/readyz").status == 200


def test_a_token_is_made_used_listed_and_revoked(
    headgate: Command, service: ServiceProcess, data: Path
) -> None:
    here = ("--url", service.address, "--data", str(data))
    made = headgate("token", "create", "ci", "--expires", "1h", *here)
    assert made.code == 0, made
    token_id, _ = read_token(made.out.strip()) or ("", "")
    used = ("--url", service.address, "--token", made.out.strip())
    assert headgate("tasks", *used).code == 0
    refused = headgate("token", "list", *used)
    assert (refused.code, "permission admin" in refused.err) == (4, True)
    listed = headgate("token", "list", *here)
    (row,) = [line for line in listed.out.splitlines() if token_id in line]
    assert row.split()[1:5] == ["ci", "submit,", "read,", "cancel"]
    shown = headgate("token", "list", "--json", *here).lines
    assert [one["name"] for one in shown] == ["ci", "first"]
    assert headgate("token", "revoke", token_id, *here).out == f"{token_id} ci is revoked\n"
    assert headgate("tasks", *used).code == 4
    gone = headgate("token", "revoke", "abc", *here)
    assert (gone.code, gone.err.count("\n")) == (2, 1)


def test_a_token_is_bound_and_cannot_pose_as_another(
    headgate: Command, service: ServiceProcess, data: Path
) -> None:
    here = ("--url", service.address, "--data", str(data))
    made = headgate("token", "create", "one", "--agent", "a", "--json", *here).json
    assert (made["agentId"], made["permissions"]) == ("a", ["submit", "read", "cancel"])
    used = ("--url", service.address, "--token", made["token"])
    assert headgate("submit", "hello", "--agent", "a", *used).code == 0
    other = headgate("submit", "hello", "--agent", "b", *used)
    assert (other.code, "is for 'a' only" in other.err) == (4, True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("x", "--permission", "all"), "is not one of"),
        (("x", "--expires", "soon"), "is neither"),
        (("x", "--store", "memory:"), "goes with --offline"),
        (("x", "--offline", "--token", "t"), "asks no service"),
        (("x", "--permission", "admin", "--agent", "a"), "admin is for the whole service"),
    ],
)
def test_a_wrong_call_is_told_in_words(
    headgate: Command,
    service: ServiceProcess,
    data: Path,
    arguments: tuple[str, ...],
    problem: str,
) -> None:
    url = () if "--offline" in arguments else ("--url", service.address)
    said = headgate("token", "create", *arguments, *url, "--data", str(data))
    assert (said.code, problem in said.err) == (2, True), said


def test_usage_is_a_table_and_json(headgate: Command, service: ServiceProcess, data: Path) -> None:
    here = ("--url", service.address, "--data", str(data))
    ran = headgate("submit", "ask", "--agent", "coder", "--wait", *here)
    assert ran.code == 0, ran
    table = headgate("usage", "--by", "model", *here).out.splitlines()
    columns = ["model", "tasks", "attempts", "tokens", "dollars"]
    assert table[1].split() == [*columns, "assumed", "tokens", "assumed", "dollars"]
    assert any(line.split()[:1] == ["gpt-4o"] for line in table)
    rows = headgate("usage", "--by", "agent", "--json", *here).json["rows"]
    (row,) = [one for one in rows if one["key"] == "coder"]
    assert (row["tasks"], row["tokens"]) == (1, 1000)
    known = headgate("estimates", *here).out.splitlines()
    assert known[1].split()[:3] == ["target", "project", "action"]
    assert ["model", "default", "ask"] in [line.split()[:3] for line in known]
    (kind,) = headgate("estimates", "--project", "default", "--json", *here).json["kinds"][:1]
    assert (kind["usd"]["largest"], kind["tokens"]["largest"]) == (0.0025, 1000)
    wrong = headgate("usage", "--since", "yesterday", *here)
    assert (wrong.code, "since" in wrong.err) == (2, True)


def test_whoever_lost_all_tokens_makes_one_where_the_store_is(
    headgate: Command, tmp_path: Path
) -> None:
    (tmp_path / "headgate.toml").write_text(SETTINGS)
    folder = tmp_path / "data"
    create = ("token", "create", "op", "--offline", "--data", str(folder))
    with running_service(tmp_path) as service:
        held = headgate(*create)
        assert (held.code, "is in use by process" in held.err) == (1, True)
        service.stop()
        write_token(folder, WRONG)
        made = headgate(*create)
        assert made.code == 0, made
        assert (folder / PREVIOUS).read_text().strip() == WRONG
        service.start()
        assert "token hg_" not in service.output()
        here = ("--url", service.address, "--data", str(folder))
        names = [one["name"] for one in headgate("token", "list", "--json", *here).lines]
        assert names == ["op", "first"]


def found_store(folder: Path) -> None:
    async def found() -> None:
        store = SqliteTaskStore(folder / "headgate.db", keeps_ledger=True)
        await store.open()
        await store.close()

    asyncio.run(found())


def test_a_store_that_is_not_there_is_not_created_for_a_token(
    headgate: Command, tmp_path: Path
) -> None:
    typo = tmp_path / "typo"
    said = headgate("token", "create", "x", "--offline", "--data", str(typo))
    assert (said.code, said.out) == (2, "")
    assert f"there is no store at {typo / 'headgate.db'}" in said.err
    assert not typo.exists()
    said = headgate("token", "create", "x", "--offline", "--store", "memory:")
    assert (said.code, "a store in memory keeps no tokens" in said.err) == (2, True)


def test_only_a_token_that_may_do_everything_becomes_that_of_the_machine(
    headgate: Command, tmp_path: Path
) -> None:
    found_store(tmp_path)
    offline = ("--offline", "--data", str(tmp_path), "--json")
    first = headgate("token", "create", "op", *offline).json["token"]
    for lesser in (("--permission", "admin"), ("--agent", "a"), ("--least-priority", "5")):
        made = headgate("token", "create", "less", *lesser, *offline)
        assert made.code == 0, made
        assert (tmp_path / "token").read_text().strip() == first


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--least-priority", "99999999999999999999"), "leastPriority"),
        (("--agent", ""), "agentId: is empty"),
        (("--project", ""), "projectId: is empty"),
        (("--agent", "a\tb"), "must be printable"),
        (("--project", "nowhere"), "unknown project 'nowhere'"),
        (("--expires", "9999-12-31T00:00:00Z"), "too far away"),
    ],
)
def test_a_token_made_offline_is_checked_like_any_other(
    headgate: Command, tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    found_store(tmp_path)
    said = headgate("token", "create", "x", "--offline", "--data", str(tmp_path), *arguments)
    assert (said.code, problem in said.err) == (2, True), said
    assert not (tmp_path / "token").exists()


async def test_a_node_that_was_not_the_first_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    class Raced(FakeTokens):
        async def list(self) -> list[Token]:
            return []

    tokens = Raced()
    assert len(await token_lines(tokens, tmp_path / "a", is_needed=False)) == 2
    assert await token_lines(tokens, tmp_path / "b", is_needed=False) == []
    assert list((tmp_path / "b").iterdir()) == []
    write_token(tmp_path / "b", WRONG)
    await token_lines(tokens, tmp_path / "b", is_needed=False)
    assert (tmp_path / "b" / "token").read_text().strip() == WRONG
    assert len(tokens.kept) == 1


async def test_a_later_start_says_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    tokens = FakeTokens()
    first = await token_lines(tokens, tmp_path, is_needed=False)
    assert first[0] == f"token {(tmp_path / 'token').read_text().strip()}"
    assert await token_lines(tokens, tmp_path, is_needed=True) == []
    (token_id,) = tokens.kept
    await tokens.revoke(token_id)
    assert "has a token that is over" in (await token_lines(tokens, tmp_path, is_needed=False))[0]
    write_token(tmp_path, WRONG)
    assert "has no token of this store" in (await token_lines(tokens, tmp_path, is_needed=False))[0]
    (tmp_path / "token").chmod(0o644)
    assert "others may read" in (await token_lines(tokens, tmp_path, is_needed=False))[0]
    (tmp_path / "token").unlink()
    assert await token_lines(tokens, tmp_path, is_needed=False) == []
    assert (
        "does not exist; headgate token" in (await token_lines(tokens, tmp_path, is_needed=True))[0]
    )
    assert len(tokens.kept) == 1


def test_nodes_share_tokens_and_only_the_first_makes_one(
    headgate: Command, tmp_path: Path, postgres_url: str
) -> None:
    folders = (tmp_path / "first", tmp_path / "second")
    for each in folders:
        each.mkdir()
        (each / "headgate.toml").write_text(SETTINGS)
    store = ("--store", postgres_url)
    with running_service(folders[0], *store) as first:
        assert "token hg_" in first.output()
        with running_service(folders[1], *store) as second:
            assert "token hg_" not in second.output()
            assert not (folders[1] / "data" / "token").exists()
            here = ("--url", first.address, "--data", str(folders[0] / "data"))
            made = headgate("token", "create", "one", *here).out.strip()
            there = ("--url", second.address, "--token", made)
            task_id = headgate("submit", "x", "--agent", "a", "--not-before", "1h", *there).out
            # Only the first node knows why, and it is asked with the caller's own token.
            wait_until(
                lambda: headgate("why", task_id.strip(), *there).code == 0,
                seconds=10.0,
                what=lambda: str(headgate("why", task_id.strip(), *there)),
            )


def test_there_is_a_token_at_every_moment_and_it_outlives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_token(tmp_path, "hg_old")
    synced: list[bool] = []
    rename, sync = Path.replace, os.fsync

    def watched(self: Path, target: Path) -> Path:
        assert (tmp_path / "token").exists()
        renamed = rename(self, target)
        assert (tmp_path / "token").exists()
        return renamed

    def noted(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        sync(descriptor)

    monkeypatch.setattr(Path, "replace", watched)
    monkeypatch.setattr(os, "fsync", noted)
    for _ in range(2):
        assert write_token(tmp_path, "hg_new") is None
    assert synced[-2:] == [False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["token", PREVIOUS]


async def test_an_older_token_is_not_put_back_where_there_was_none(tmp_path: Path) -> None:
    class Raced(FakeTokens):
        async def list(self) -> list[Token]:
            return []

    tokens = Raced()
    await token_lines(tokens, tmp_path / "a", is_needed=False)
    (tmp_path / PREVIOUS).write_text(WRONG)
    assert await token_lines(tokens, tmp_path, is_needed=False) == []
    assert not (tmp_path / "token").exists()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert write_token(tmp_path / "file", "hg_x") is not None
    assert write_token(tmp_path / "new" / "folder", "hg_x") is None
    written = tmp_path / "new" / "folder" / "token"
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert [path.name for path in written.parent.iterdir()] == ["token"]
