"""Prices in the settings: by pattern, over the published ones, in force without a restart."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from config.running import FAST, running
from headgate.cli.main import run
from headgate.config import load_prices, load_settings
from headgate.errors import InvalidSettingError
from headgate.providers.prices import Price, PriceList
from headgate.workflow.costs import check_prices, with_settings_prices
from headgate.workflow.parser import read_workflow
from headgate.workflow.run_record import RunScope

TARGET = """
[targets.model]
kind = "callable"
entry_point = "config.reload_work:model"
default = true
"""
CHEAP = '[prices."house-*"]\ninput = 1.25\noutput = "10"\ncached_input = 0.125\n'
FLOW = """
config:
  endpoints: {house: {kind: openai, url: "http://127.0.0.1:9/v1"}}
  prices: {own: {input: 3, output: 3}}
  defaults: {endpoint: house, max_tokens: 10}
steps:
  - {id: one, model: own, prompt: hello}
  - {id: two, model: house-7b, prompt: hello}
"""
DEAR = CHEAP.replace("1.25", "2.5")


def test_a_table_of_prices_is_read_by_pattern_and_without_floats(tmp_path: Path) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text(CHEAP)
    wanted = {"house-*": Price(input=1.25, output="10", cached_input=0.125)}
    assert load_prices(path) == wanted
    assert load_settings(path, {}, {}).price_overrides == wanted
    found = PriceList(wanted).cost(
        "house-7b", input_tokens=1_000_000, output_tokens=0, cache_read_tokens=1
    )
    # 999,999 tokens at $1.25 and one at $0.125 a million, rounded up.
    assert found.micro_usd == 1_249_999


def test_prices_alone_are_read_beside_whatever_else_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text("[scheduler]\nmax_inflight = 0\n" + CHEAP)
    assert list(load_prices(path)) == ["house-*"]
    path.write_text(CHEAP.replace("1.25", "-1"))
    with pytest.raises(InvalidSettingError, match=r"from 0 to 1,000,000, not -1 .*, line 2\)"):
        load_prices(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[prices.m]\ninput = 1\n", "prices.m.output: is missing; write it"),
        ("[prices.m]\ninput = []\noutput = 1\n", "prices.m.input: must be a string or a number"),
        (
            "[prices.m]\ninput_usd = 1\noutput = 1\n",
            "prices.m.input_usd: is not a setting; did you mean input?",
        ),
        (
            "[prices.m]\ninput = 1\noutput = 1\n[prices.M]\ninput = 1\noutput = 1\n",
            "prices.M: prices.m is the same model; keep one of them",
        ),
    ],
)
def test_a_price_that_is_wrong_is_one_line(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text(text)
    with pytest.raises(InvalidSettingError) as caught:
        load_settings(path, {}, {})
    assert str(caught.value).startswith(line)


async def test_a_task_costs_what_the_settings_say_and_a_reload_changes_it(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + TARGET + CHEAP) as service:
        first = await service.ended(await service.submit())
        assert first["usage"]["usd"] == 1.25
        service.path.write_text(FAST + TARGET + DEAR)
        changed = (await service.ask("POST", "/scheduler/reload")).json["changed"]
        assert [change["key"] for change in changed] == ['prices."house-*".input']
        second = await service.ended(await service.submit())
        assert second["usage"]["usd"] == 2.5
        shown = await service.get("/settings?section=prices")
        assert {one["key"]: one["value"] for one in shown["settings"]} == {
            'prices."house-*".input': 2.5,
            'prices."house-*".output': "10",
            'prices."house-*".cached_input': 0.125,
            'prices."house-*".cache_write': None,
        }


async def test_what_a_worker_reports_is_priced_by_the_settings(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + CHEAP) as service:
        task_id = await service.submit(target="pull")
        claimed = (
            await service.ask("POST", "/agents/a/claim", {"capacity": 1, "waitSeconds": 5})
        ).json
        (task,) = claimed["tasks"]
        usage = {"input_tokens": 1_000_000, "output_tokens": 0}
        body = {
            "workerId": claimed["workerId"],
            "attempt": task["attempt"],
            "result": {"model": "house-7b", "usage": usage},
        }
        assert (await service.ask("POST", f"/tasks/{task_id}/complete", body)).status == 200
        assert (await service.ended(task_id))["usage"]["usd"] == 1.25


def test_a_run_here_is_priced_by_the_settings_file_beneath_its_own(tmp_path: Path) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text(CHEAP + "[prices.own]\ninput = 7\noutput = 7\n")
    file = tmp_path / "flow.yaml"
    file.write_text(FLOW)
    workflow = with_settings_prices(read_workflow(file, file.read_bytes()), path)
    check_prices(workflow, [RunScope(scope="workflow:w", micro_usd=1)])
    costs = [
        workflow.price_list.cost(model, input_tokens=1_000_000, output_tokens=0).usd
        for model in ("own", "house-7b")
    ]
    assert costs == [3, Decimal("1.25")]


def test_a_dry_run_takes_the_prices_of_the_settings_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flow.yaml").write_text(FLOW)
    limited = ["run", "flow.yaml", "--dry-run", "--data", "d", "--budget-usd", "5"]
    assert run(limited) == 2
    assert "model 'house-7b' has no known price" in capsys.readouterr().err
    Path("headgate.toml").write_text(CHEAP)
    assert run(limited) == 0
