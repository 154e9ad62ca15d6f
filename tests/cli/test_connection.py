"""Where a command finds the service and its token, and to whom the token is not given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from client.scripted_server import ScriptedServer, response, scripted
from headgate.cli.connection import Connection, accepted_service, connect
from headgate.cli.main import run
from headgate.cli.run_session import found_address
from headgate.errors import InvalidSettingError, NotAllowedError
from headgate.storage.data_lock import announce, hold_directory
from headgate.workflow.run_record import RunOptions

READY = response(200, '{"status":"ready","role":"dispatcher"}')
REFUSED = response(401, '{"code":"unauthorized","error":"a token is needed","retryable":false}')


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a data directory with a token in it the one of the user."""
    for name in ("HEADGATE_URL", "HEADGATE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    directory = tmp_path / "headgate"
    directory.mkdir(mode=0o700)
    write_token(directory)
    return directory


def write_token(directory: Path, mode: int = 0o600) -> None:
    (directory / "token").write_text("from-the-file\n")
    (directory / "token").chmod(mode)


@contextmanager
def serving(directory: Path, *answers: bytes) -> Iterator[ScriptedServer]:
    """Run a service on a data directory."""
    with scripted(*answers) as server, hold_directory(directory, address=server.url):
        yield server


def sent_token(connection: Connection, *, directory: Path | None = None) -> str:
    """Return what a request has as its token; `directory` is that of the service."""
    serves = scripted(READY) if directory is None else serving(directory, READY)
    with serves as server, connect(connection._replace(url=server.url)) as client:
        client.ready()
        return server.headers("authorization")[0].removeprefix("Bearer ")


def test_the_token_is_that_of_the_option_then_of_the_environment_then_of_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sent_token(Connection(), directory=home) == "from-the-file"
    monkeypatch.setenv("HEADGATE_TOKEN", "from-outside")
    assert sent_token(Connection()) == "from-outside"
    assert sent_token(Connection(token="given")) == "given"


def test_the_file_of_another_data_directory_can_be_named(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert sent_token(Connection(data=other)) == ""
    write_token(other)
    assert sent_token(Connection(data=other)) == "from-the-file"


def test_the_token_of_this_machine_is_not_sent_to_another_one(home: Path) -> None:
    with connect(Connection(url="http://example.com")) as client:
        assert "authorization" not in client._transport._headers
    with connect(Connection(url="http://example.com", data=home)) as client:
        assert "authorization" in client._transport._headers


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_token_that_others_can_read_is_not_used(home: Path, mode: int) -> None:
    write_token(home, mode)
    assert sent_token(Connection(), directory=home) == ""
    with pytest.raises(InvalidSettingError, match="others may read"):
        sent_token(Connection(data=home))


BAD_FILES = [
    (b"two words\n", 0o600, "has no token: it must be one word of printable ASCII characters"),
    (b"\xff\xfe\x00\n", 0o600, "has no token: it must be one word of printable ASCII characters"),
    (b"from-the-file\n", 0o644, "others may read"),
]


@pytest.mark.parametrize(("content", "mode", "problem"), BAD_FILES)
def test_a_bad_token_file_that_nobody_named_stops_no_command(
    home: Path, content: bytes, mode: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "token").write_bytes(content)
    (home / "token").chmod(mode)
    with serving(home, READY, READY) as server, connect(Connection(url=server.url)) as client:
        for _ in range(2):
            client.ready()
        assert server.headers("authorization") == ["", ""]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("headgate: warning: ")
    assert str(home / "token") in said
    assert problem in said
    assert "--data" in said


@pytest.mark.parametrize(("content", "mode", "problem"), BAD_FILES)
@pytest.mark.parametrize("is_named", [False, True])
def test_a_bad_token_file_is_named_where_a_token_is_needed(
    home: Path,
    content: bytes,
    mode: int,
    problem: str,
    is_named: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (home / "token").write_bytes(content)
    (home / "token").chmod(mode)
    named = ["--data", str(home)] if is_named else []
    with serving(home, REFUSED) as server:
        assert run(["tasks", "--url", server.url, *named]) == (2 if is_named else 4)
        assert len(server.requests) == (0 if is_named else 1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(home / "token") in said
    assert problem in said


def test_what_talks_to_a_service_for_long_names_a_bad_token_file(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_token(home, 0o644)
    with serving(home, READY, REFUSED) as server:
        assert accepted_service(Connection(url=server.url)) == (server.url, None)
        assert "others may read" in capsys.readouterr().err
        with pytest.raises(NotAllowedError, match="others may read"):
            accepted_service(Connection(url=server.url))


def test_without_a_token_the_refusal_says_where_one_is_looked_for(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "token").unlink()
    with scripted(REFUSED) as server:
        assert run(["stats", "--url", server.url]) == 4
    assert "HEADGATE_TOKEN" in capsys.readouterr().err


def test_the_data_directory_says_where_its_service_is(home: Path) -> None:
    with scripted(READY) as server:
        with hold_directory(home, address=server.url):
            pass
        with connect(Connection(data=home)) as client:
            assert client.ready().role == "dispatcher"


def test_a_service_on_the_usual_directory_is_found_at_whatever_port_it_has(home: Path) -> None:
    with scripted(READY) as server, hold_directory(home, address=server.url):
        with connect(Connection()) as client:
            assert client.url == server.url
        with connect(Connection(url="http://127.0.0.1:9")) as client:
            assert client.url == "http://127.0.0.1:9"
    # A service that has stopped says nothing about the next one.
    with connect(Connection()) as client:
        assert client.url == "http://127.0.0.1:7420"


def test_a_service_whose_store_is_elsewhere_is_found_by_its_directory(home: Path) -> None:
    with announce(home, address="http://127.0.0.1:7421"):
        # Another node may use the directory too. The first is the one that is found.
        with announce(home, address="http://127.0.0.1:7422"), hold_directory(home):
            pass
        for connection in (Connection(), Connection(data=home)):
            with connect(connection) as client:
                assert client.url == "http://127.0.0.1:7421"
    with connect(Connection()) as client:
        assert client.url == "http://127.0.0.1:7420"


def test_a_data_directory_that_is_named_comes_before_an_address_in_the_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_URL", "http://example.com:1")
    with hold_directory(home, address="http://127.0.0.1:7421"):
        pass
    found = {
        Connection(): "http://example.com:1",
        Connection(data=home): "http://127.0.0.1:7421",
        Connection(data=home, url="http://127.0.0.1:7422"): "http://127.0.0.1:7422",
    }
    for connection, url in found.items():
        with connect(connection) as client:
            assert client.url == url


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ("http://0.0.0.0:7421", "http://127.0.0.1:7421"),
        ("http://[::]:7421", "http://[::1]:7421"),
        ("http://10.0.0.12:7421", "http://10.0.0.12:7421"),
    ],
)
def test_an_address_to_serve_on_becomes_one_to_ask(home: Path, held: str, found: str) -> None:
    with hold_directory(home, address=held):
        pass
    with connect(Connection(data=home)) as client:
        assert client.url == found


@pytest.mark.parametrize("content", [None, "", "http://127.0.0.1:0"])
@pytest.mark.parametrize("command", [["budget", "set", "root", "--limit-usd", "1"], ["why"]])
def test_a_directory_that_is_named_and_has_no_address_leads_to_no_other_service(
    home: Path,
    command: list[str],
    content: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = home / "other"
    if content is not None:
        with hold_directory(other, address=content):
            pass
    problem = "does not exist" if content is None else "has no address of a service"
    with scripted(READY, READY) as server:
        for variable in ("", server.url):
            monkeypatch.setattr("headgate.client.requests.DEFAULT_URL", server.url)
            monkeypatch.setenv("HEADGATE_URL", variable)
            assert run([*command, "--data", str(other)]) == 3
            assert capsys.readouterr().err == (
                f"headgate: {other} {problem}; start the service with headgate up --data {other}, "
                "or give --url\n"
            )
        assert not server.requests
    assert other.exists() == (content is not None)


@pytest.mark.parametrize(
    ("command", "body", "line"),
    [
        (["tasks"], '{"tasks":[],"count":0}', "No tasks at {url}"),
        (["calls"], '{"calls":[],"count":0}', "No calls at {url}"),
        (["slot", "list"], '{"slots":[],"count":0}', "headgate: There are no slots at {url}."),
        (["agent", "list"], '{"agents":[]}', "headgate: There are no agents at {url}."),
    ],
)
def test_an_empty_list_says_which_service_has_none(
    home: Path, command: list[str], body: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(response(200, body)) as server:
        assert run([*command, "--url", server.url]) == 0
        wanted = line.format(url=server.url)
    said = capsys.readouterr()
    assert (said.out + said.err).startswith(wanted)


@pytest.mark.parametrize("given", ["nosuch", "call-nosuch"])
def test_why_repeats_the_id_that_a_service_does_not_know_and_its_address(
    home: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    body = '{"code":"not_found","error":"it is not found","retryable":false}'
    with scripted(response(404, body)) as server:
        assert run(["why", given, "--url", server.url]) == 2
        assert capsys.readouterr().err == f"headgate: it is not found: {given} at {server.url}\n"


def test_a_file_is_not_taken_for_a_data_directory(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("tasks", "runs", "up", "runs show last", "token create x --offline"):
        for data in (home / "token", home / "token" / "data"):
            assert run([*command.split(), "--data", str(data)]) == 2
            assert " is not a directory; name " in capsys.readouterr().err


def test_a_named_directory_that_is_missing_is_not_taken_for_one_without_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("runs", "runs --json", "runs show last", "runs output last step"):
        assert run([*command.split(), "--data", str(home / "missing")]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert f"{home / 'missing'} does not exist" in said.err
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "usual"))
    assert run(["runs"]) == 0


def test_a_usual_directory_that_cannot_be_made_is_a_wrong_setting(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "token"))
    for command in ("runs", "up"):
        assert run([command]) == 2
        assert "the directory cannot be made: " in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every directory")
def test_a_directory_that_nobody_may_enter_is_not_taken_for_an_empty_one(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold_directory(home, address="http://127.0.0.1:1"):
        pass
    home.chmod(0o400)
    assert run(["tasks", "--data", str(home)]) == 3
    home.chmod(0o700)
    assert f"{home} cannot be read (Permission denied)" in capsys.readouterr().err


def test_a_service_that_is_not_there_has_an_exit_code_of_its_own(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.client.sync_client.pause_seconds", lambda *_: None)
    assert run(["tasks", "--url", "http://127.0.0.1:1"]) == 3
    assert capsys.readouterr().err == (
        "headgate: no service answers at http://127.0.0.1:1: Connection refused; start one with "
        "headgate up, or name another with --data, --url or HEADGATE_URL\n"
    )


@pytest.mark.parametrize("url", ["nonsense", "http://a:b@c/", "http://x\n"])
def test_a_wrong_address_is_a_wrong_call(
    home: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tasks", "--url", url]) in {2, 3}
    assert capsys.readouterr().err.count("\n") == 1


UNKNOWN = response(
    401,
    '{"code":"unauthorized","error":"this service does not recognise that token",'
    '"retryable":false}',
)


def test_a_stale_token_file_is_left_out_where_no_token_is_needed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = serving(home, UNKNOWN, READY, READY)
    with service as server, connect(Connection(url=server.url)) as client:
        assert client.ready().role == "dispatcher"
        assert client.ready().role == "dispatcher"
        sent = server.headers("authorization")
    assert sent == ["Bearer from-the-file", "", ""]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(home / "token") in said
    assert "--data" in said


@pytest.mark.parametrize("address", [None, "", "http://127.0.0.1:0"])
def test_the_token_of_a_directory_without_the_address_of_a_service_is_sent_nowhere(
    home: Path, address: str | None
) -> None:
    holding = nullcontext() if address is None else hold_directory(home, address=address)
    with holding:
        assert sent_token(Connection()) == ""
    assert sent_token(Connection()) == ""
    assert sent_token(Connection(data=home)) == "from-the-file"


@pytest.mark.parametrize("is_running", [True, False])
def test_the_token_of_a_directory_is_sent_to_no_service_but_its_own(
    home: Path, is_running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = hold_directory(home, address="http://127.0.0.1:1")
    with holding if is_running else nullcontext():
        if not is_running:
            with holding:
                pass
        assert sent_token(Connection()) == ""
        assert sent_token(Connection(data=home)) == "from-the-file"
        with scripted(READY) as server:
            monkeypatch.setenv("HEADGATE_URL", server.url)
            with connect(Connection()) as client:
                client.ready()
            assert server.headers("authorization") == [""]


def test_a_run_sends_the_token_of_the_usual_directory_to_no_other_service(home: Path) -> None:
    other = RunOptions(data=home, server="http://example.com")
    assert found_address(other) == ("http://example.com", None)
    with scripted(READY) as server, hold_directory(home, address=server.url):
        own = RunOptions(data=home, server=server.url)
        assert found_address(own) == (server.url, "from-the-file")


def test_the_service_of_the_usual_directory_gets_its_token_under_every_name(home: Path) -> None:
    with scripted(READY, READY) as server:
        port = server.url.rpartition(":")[2]
        with hold_directory(home, address=f"http://0.0.0.0:{port}"):
            for host in ("127.0.0.1", "localhost"):
                with connect(Connection(url=f"http://{host}:{port}")) as client:
                    client.ready()
            assert server.headers("authorization") == ["Bearer from-the-file"] * 2


def test_a_stale_token_file_is_named_where_a_token_is_needed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(home, UNKNOWN, REFUSED) as server:
        assert run(["tasks", "--url", server.url]) == 4
    said = capsys.readouterr().err
    assert said == (
        "headgate: Login failed: this service does not recognise that token "
        f"(read from {home / 'token'}). Name the service's directory with --data, or give "
        "--token.\n"
    )


@pytest.mark.parametrize("is_option", [True, False])
def test_a_token_that_somebody_gave_is_never_left_out(
    home: Path,
    is_option: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--token", "given"] if is_option else []
    if not is_option:
        monkeypatch.setenv("HEADGATE_TOKEN", "given")
    with scripted(UNKNOWN, READY) as server:
        assert run(["tasks", "--url", server.url, *given]) == 4
        assert server.headers("authorization") == ["Bearer given"]
    origin = "--token" if is_option else "HEADGATE_TOKEN"
    assert f"(read from {origin})" in capsys.readouterr().err


def test_what_talks_to_a_service_for_long_begins_without_a_stale_token(home: Path) -> None:
    with serving(home, UNKNOWN, response(200, "{}")) as server:
        assert accepted_service(Connection(url=server.url)) == (server.url, None)
    with serving(home, response(200, "{}")) as server:
        assert accepted_service(Connection(url=server.url)) == (server.url, "from-the-file")
