"""No key comes back, however its provider repeats it: in pieces, escaped, or out of a header."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.billing_upstream import Plan
from gateway.gateway_service import CHAT, ENVIRON, MESSAGES, OPENAI_KEY, UPSTREAMS, gateway_service
from headgate.gateway.routing import MAX_HELD_BYTES, Credentials, StreamMask

KEY = "sk-canary/0123456789"
TEAM = "team-canary-9876543210"
CREDENTIALS = Credentials((b"authorization", b"Bearer " + KEY.encode()), (TEAM.encode(),))
ESCAPED = "".join(f"\\u{ord(one):04x}" for one in KEY)
WITH_HEADER = UPSTREAMS.replace(
    "[upstreams.openai]", '[upstreams.openai]\nheaders = {team = "{env.TEAM}"}'
)


@pytest.mark.parametrize("said", [KEY, ESCAPED, KEY.replace("/", "\\/"), TEAM])
def test_a_secret_is_hidden_wherever_a_stream_is_parted(said: str) -> None:
    line = f'data: {{"text": "{said}"}}\n\n'.encode()
    hidden = b"[secret]" if said == TEAM else b"[key]"
    for cut in range(len(line)):
        for further in (cut, (cut + len(line)) // 2):
            mask = StreamMask(CREDENTIALS)
            pieces = (line[:cut], line[cut:further], line[further:])
            shown = b"".join(mask.feed(piece) for piece in pieces) + mask.finish()
            assert shown == b'data: {"text": "%b"}\n\n' % hidden


@pytest.mark.parametrize("word", [b"x", b"ollama", b"not-needed"])
def test_a_word_in_place_of_a_key_changes_no_answer(word: bytes) -> None:
    credentials = Credentials((b"authorization", b"Bearer " + word), (word,))
    line = b'data: {"index": 0, "text": "ollama is not-needed"}\n\n'
    mask = StreamMask(credentials)
    assert mask.feed(line) + mask.finish() == line
    assert credentials.hidden_in(line) == line


def test_whole_lines_go_on_at_once_and_the_rest_at_the_end() -> None:
    mask = StreamMask(CREDENTIALS)
    assert mask.feed(b"data: 1\n\ndata: 2") == b"data: 1\n\n"
    assert mask.feed(b"\n") == b"data: 2\n"
    assert mask.feed(b"cut off") == b""
    assert mask.finish() == b"cut off"


def test_a_line_without_an_end_is_not_kept_without_end() -> None:
    mask = StreamMask(CREDENTIALS)
    text = (b"x" * 999 + KEY.encode()) * (3 * MAX_HELD_BYTES // 1_000)
    pieces = [text[start : start + 777] for start in range(0, len(text), 777)]
    shown = []
    held = 0
    for piece in pieces:
        shown.append(mask.feed(piece))
        held += len(piece) - len(shown[-1])
    assert sum(map(len, shown)) > MAX_HELD_BYTES
    assert b"".join(shown) + mask.finish() == text.replace(KEY.encode(), b"[key]")


@pytest.mark.parametrize("is_stream", [True, False])
async def test_what_is_secret_in_the_headers_of_an_upstream_does_not_come_back(
    tmp_path: Path, is_stream: bool
) -> None:
    environ = {**ENVIRON, "TEAM": TEAM}
    async with gateway_service(tmp_path, upstreams=WITH_HEADER, environ=environ) as gateway:
        gateway.upstream.script.append(Plan(text=f"you are {TEAM} with {OPENAI_KEY}"))
        answer = await gateway.ask(CHAT, is_stream=is_stream)
        assert gateway.upstream.requests[-1].headers["team"] == TEAM
        assert answer.status_code == 200, answer.text
        assert TEAM not in answer.text
        assert OPENAI_KEY not in answer.text
        assert "[secret]" in answer.text
        gateway.upstream.script.append(Plan(status=400, message=f"unknown {TEAM}"))
        refused = await gateway.ask(CHAT, is_stream=is_stream)
        assert refused.status_code == 400
        assert TEAM not in refused.text + str(refused.headers) + repr(await gateway.latest())
        assert (await gateway.ask(MESSAGES)).status_code == 200
