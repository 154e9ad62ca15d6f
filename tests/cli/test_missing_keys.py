"""Keys that are missing are told alike by `config check` and at the start of `up`."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.cli.config_report import has_no_upstream_key, missing_keys
from headgate.config import Settings, load_settings

SLOT = '[[slots]]\nname = "second"\nprovider = "anthropic"\nkey_env = "KEY_B"\n'
REQUIRED = "[auth]\nrequired = true\n"
NEEDS_B = "slots.second: needs KEY_B in the environment"
NO_KEY = (
    "gateway: no upstream has a key, and clients send tokens of Headgate"
    "; set ANTHROPIC_API_KEY or OPENAI_API_KEY where the service starts"
)
ELLIPSIS = "sk-ant-\N{HORIZONTAL ELLIPSIS}"
NO_SUCH_KEY = (
    "upstreams.{}.key_env: the variable {} does not hold just a key"
    ", one line of printable ASCII without spaces"
)
HOUSE = '[upstreams.house]\nkind = "openai"\nkey_env = "HOUSE_KEY"\n'


def loaded(folder: Path, text: str) -> Settings:
    file = folder / "headgate.toml"
    file.write_text(text)
    return load_settings(file, {}, {})


@pytest.mark.parametrize(
    ("text", "environ", "lines"),
    [
        ("", {}, []),
        (SLOT, {}, [NEEDS_B]),
        (SLOT, {"KEY_B": "sk-b"}, []),
        (SLOT + "enabled = false", {}, []),
        (HOUSE, {}, ["upstreams.house: needs HOUSE_KEY in the environment"]),
        (REQUIRED, {}, [NO_KEY]),
        (REQUIRED, {"OPENAI_API_KEY": "sk-o"}, []),
        (REQUIRED + HOUSE, {"HOUSE_KEY": "sk-h"}, []),
        ("[gateway]\nenabled = false\n" + REQUIRED, {}, []),
        (
            "",
            {"ANTHROPIC_API_KEY": ELLIPSIS},
            [NO_SUCH_KEY.format("anthropic", "ANTHROPIC_API_KEY")],
        ),
        (HOUSE, {"HOUSE_KEY": ELLIPSIS}, [NO_SUCH_KEY.format("house", "HOUSE_KEY")]),
    ],
)
def test_a_missing_key_has_one_line(
    text: str, environ: dict[str, str], lines: list[str], tmp_path: Path
) -> None:
    assert missing_keys(loaded(tmp_path, text), environ) == lines


def test_without_any_key_clients_send_their_own(tmp_path: Path) -> None:
    assert has_no_upstream_key(loaded(tmp_path, ""), {})
    assert not has_no_upstream_key(loaded(tmp_path, ""), {"OPENAI_API_KEY": "sk-o"})
    local = '[upstreams.local]\nkind = "openai"\nbase_url = "http://127.0.0.1:11434/v1"\n'
    assert not has_no_upstream_key(loaded(tmp_path, local), {})
