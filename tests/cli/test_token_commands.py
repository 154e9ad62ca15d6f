"""`headgate token` and `headgate usage`, on a service that asks for tokens."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest

from api.fake_tokens import FakeTokens
from cli.said import Command, Said
from headgate.app import build_service
from headgate.cli.connection import PENDING, PREVIOUS, file_lines, make_first_token, write_token
from headgate.cli.main import run
from headgate.cli.up import attach_first_token
from headgate.config import Settings
from headgate.config.settings import StoreSettings
from headgate.storage.sqlite import SqliteTaskStore
from headgate.storage.tokens import KeptToken, Token, new_token, read_token
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


def test_a_name_belongs_to_one_token_until_that_is_revoked(
    headgate: Command, service: ServiceProcess, data: Path
) -> None:
    here = ("--url", service.address, "--data", str(data))
    text = headgate("token", "create", "twin", "--expires", "1h", *here).out.strip()
    first, _ = read_token(text) or ("", "")
    refused = headgate("token", "create", "twin", *here)
    line = f"the token {first} has the name 'twin' already; choose a different name"
    line += ", or revoke it with"
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"headgate: {line} headgate token revoke {first}\n"
    assert headgate("token", "revoke", "twin", *here).out == f"{first} twin is revoked\n"
    assert headgate("token", "create", "twin", "--expires", "1h", *here).code == 0


def test_a_budget_is_adjusted_with_the_token_of_a_data_directory(
    headgate: Command, service: ServiceProcess, data: Path
) -> None:
    here = ("--url", service.address, "--data", str(data))
    adjust = ("budget", "adjust", "session:s", "--usd", "2", *here)
    refused = headgate(*adjust)
    assert (refused.code, "say why" in refused.err) == (2, True)
    said = headgate(*adjust, "--reason", "on the invoice")
    assert (said.code, "$2.00 spent" in said.out) == (0, True), said
    assert service.ask("GET", "/budgets/status").status == 401


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
    columns = ["model", "tasks", "attempts", "calls", "tokens", "dollars"]
    assert table[1].split() == [*columns, "assumed", "tokens", "assumed", "dollars"]
    # Both times have their day, or neither: the second is not of the day of the first.
    assert table[0].count("-") in (0, 4)
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
        made = headgate("token", "create", f"less{lesser[0]}", *lesser, *offline)
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
    assert len(await make_first_token(tokens, tmp_path / "a")) == 2
    assert await make_first_token(tokens, tmp_path / "b") == []
    assert list((tmp_path / "b").iterdir()) == []
    write_token(tmp_path / "b", WRONG)
    await make_first_token(tokens, tmp_path / "b")
    assert (tmp_path / "b" / "token").read_text().strip() == WRONG
    assert len(tokens.kept) == 1


async def test_a_first_token_that_was_given_is_stored_and_not_shown(tmp_path: Path) -> None:
    given = f"hg_{'a1' * 6}_{'b2' * 24}"
    tokens = FakeTokens()
    assert "b2" not in str(await make_first_token(tokens, tmp_path / "a", given))
    assert (tmp_path / "a/token").read_text().strip() == given
    assert await file_lines(tokens, tmp_path / "a", is_needed=True) == []
    other = f"hg_{'c3' * 6}_{'d4' * 24}"
    assert await make_first_token(tokens, tmp_path / "b", other) == []
    assert list(tokens.kept) == ["a1" * 6]


async def test_nodes_that_start_together_have_the_token_that_all_were_given(tmp_path: Path) -> None:
    class Raced(FakeTokens):
        async def list(self) -> list[Token]:
            return []

    given, tokens = f"hg_{'a1' * 6}_{'b2' * 24}", Raced()
    for node in ("a", "b"):
        await make_first_token(tokens, tmp_path / node, given)
        assert (tmp_path / node / "token").read_text().strip() == given
    assert len(tokens.kept) == 1


@pytest.mark.parametrize(
    "text", ["secret", f"hg_{'a1' * 6}_{'b2' * 23}", f"hg_{'A1' * 6}_{'b2' * 24}"]
)
def test_a_first_token_of_another_form_stops_the_start(
    headgate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HEADGATE_FIRST_TOKEN", text)
    said = headgate("up", "--port", "0", "--data", str(tmp_path))
    assert (said.code, said.out) == (2, "")
    assert "HEADGATE_FIRST_TOKEN" in said.err
    assert text not in said.err


async def test_a_later_start_says_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    tokens = FakeTokens()
    first = await make_first_token(tokens, tmp_path)
    assert first[0] == f"token {(tmp_path / 'token').read_text().strip()}"
    assert await file_lines(tokens, tmp_path, is_needed=True) == []
    (token_id,) = tokens.kept
    await tokens.revoke(token_id)
    assert "has a token that is over" in (await file_lines(tokens, tmp_path, is_needed=False))[0]
    write_token(tmp_path, WRONG)
    assert "has no token of this store" in (await file_lines(tokens, tmp_path, is_needed=False))[0]
    (tmp_path / "token").chmod(0o644)
    assert "others may read" in (await file_lines(tokens, tmp_path, is_needed=False))[0]
    (tmp_path / "token").unlink()
    assert await file_lines(tokens, tmp_path, is_needed=False) == []
    assert (
        "does not exist; headgate token" in (await file_lines(tokens, tmp_path, is_needed=True))[0]
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
    assert synced[-3:] == [False, True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["token", PREVIOUS]


async def test_an_older_token_is_not_put_back_where_there_was_none(tmp_path: Path) -> None:
    class Raced(FakeTokens):
        async def list(self) -> list[Token]:
            return []

    tokens = Raced()
    await make_first_token(tokens, tmp_path / "a")
    (tmp_path / PREVIOUS).write_text(WRONG)
    assert await make_first_token(tokens, tmp_path) == []
    assert not (tmp_path / "token").exists()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert write_token(tmp_path / "file", "hg_x") is not None
    assert write_token(tmp_path / "new" / "folder", "hg_x") is None
    written = tmp_path / "new" / "folder" / "token"
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert [path.name for path in written.parent.iterdir()] == ["token"]


P = ParamSpec("P")
T = TypeVar("T")


class Killed(BaseException):
    """The process ends here, and nothing that follows is done."""


class Steps:
    """Counts the steps of a start, and kills it before or after one of them."""

    def __init__(self, last: int) -> None:
        self.done = 0
        self._last = last

    def step(self) -> None:
        if self.done == self._last:
            raise Killed
        self.done += 1


class KillableTokens(FakeTokens):
    """Tokens whose store may take what it was given although nobody hears of it."""

    steps = Steps(-1)

    async def list(self) -> list[Token]:
        self.steps.step()
        return await super().list()

    async def create_first(self, kept: KeptToken) -> bool:
        self.steps.step()
        is_first = await super().create_first(kept)
        self.steps.step()
        return is_first


FILE_STEPS = ("open", "write", "fsync", "link")


async def killed_at(last: int, tokens: KillableTokens, folder: Path) -> bool:
    """Run a first start that is killed at a step; say whether it came to its end before."""
    tokens.steps = Steps(last)
    with pytest.MonkeyPatch.context() as patch:
        for name in FILE_STEPS:
            patch.setattr(os, name, _killing(tokens.steps, getattr(os, name)))
        patch.setattr(Path, "replace", _killing(tokens.steps, Path.replace))
        patch.setattr(Path, "unlink", _killing(tokens.steps, Path.unlink))
        try:
            await make_first_token(tokens, folder)
        except Killed:
            return False
        return True


def _killing(steps: Steps, call: Callable[P, T]) -> Callable[P, T]:
    def stepped(*args: P.args, **kwargs: P.kwargs) -> T:
        steps.step()
        found = call(*args, **kwargs)
        steps.step()
        return found

    return stepped


@pytest.mark.parametrize("has_older_file", [False, True])
async def test_a_first_start_that_is_killed_anywhere_leaves_a_token_that_the_next_one_finds(
    tmp_path: Path, has_older_file: bool
) -> None:
    is_whole, last = False, 0
    while not is_whole:
        folder, tokens = tmp_path / str(last), KillableTokens()
        if has_older_file:
            write_token(folder, WRONG)
        is_whole = await killed_at(last, tokens, folder)
        path = folder / "token"
        text = path.read_text().strip() if path.exists() else WRONG
        assert text == WRONG or _opens(tokens, text), "the file has a token that nobody stored"
        assert len(tokens.kept) <= 1
        tokens.steps = Steps(-1)
        await make_first_token(tokens, folder)
        assert len(tokens.kept) == 1, "a second start makes no second token"
        assert _opens(tokens, path.read_text().strip())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not (folder / PENDING).exists()
        assert await file_lines(tokens, folder, is_needed=True) == []
        last += 1
    assert last > 15, "there are that many steps to be killed at"


def _opens(tokens: FakeTokens, text: str) -> bool:
    read = read_token(text)
    kept = None if read is None else tokens.kept.get(read[0])
    return read is not None and kept is not None and kept.is_opened_by(read[1])


async def test_a_stored_token_gets_to_its_place_though_others_were_made_since(
    tmp_path: Path,
) -> None:
    last, tokens, folder = 0, KillableTokens(), tmp_path
    while not tokens.kept:
        folder, tokens = tmp_path / str(last), KillableTokens()
        await killed_at(last, tokens, folder)
        last += 1
    assert not (folder / "token").exists()
    await tokens.add(new_token(name="later", permissions=("read",), now=tokens.now()).kept)
    tokens.steps = Steps(-1)
    await make_first_token(tokens, folder)
    assert _opens(tokens, (folder / "token").read_text().strip())
    assert len(tokens.kept) == 2


async def test_a_service_is_ready_only_when_its_first_token_is_stored(tmp_path: Path) -> None:
    settings = Settings(store=StoreSettings(url="memory:"))
    service = build_service(settings, data=tmp_path, environ={})
    first = attach_first_token(service, tmp_path)
    stored, asked = asyncio.Event(), asyncio.Event()
    create = service.api.tokens.create_first

    async def slow(kept: KeptToken) -> bool:
        asked.set()
        await stored.wait()
        return await create(kept)

    service.api.tokens.create_first = slow  # type: ignore[method-assign]
    starting = asyncio.create_task(service.engine.start())
    try:
        await asked.wait()
        assert not service.engine.opened.is_set(), "connections wait"
        assert not service.engine.health().is_ready
        assert not first
        assert not (tmp_path / "token").exists()
        stored.set()
        await starting
        assert service.engine.health().is_ready
        assert first[0] == f"token {(tmp_path / 'token').read_text().strip()}"
        assert len(await service.api.tokens.list()) == 1
    finally:
        stored.set()
        await starting
        await service.engine.stop(drain_seconds=0.0)
