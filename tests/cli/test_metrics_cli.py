"""`headgate metrics`: what a dashboard and alerts name is what a service really shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import click
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from executors.endpoint import free_port
from headgate.cli.main import cli, run
from headgate.cli.metrics import Panel, alert_rules, alerts, dashboard, metrics_of, panels
from headgate.core.budgets.ledger import Unit
from headgate.core.estimates import Kind, SilentKind
from headgate.core.retention import StoreSize
from headgate.metrics import METRICS, silence_metric, store_metrics, usage_metrics
from headgate.storage.usage import UsageTotal
from service.support import ServiceProcess, wait_until

OF_PROMETHEUS = {"job", "instance", "le"}
"""Labels that Prometheus adds, and the one of a histogram."""

SEEN_SECONDS = 60.0
PROMETHEUS_SECONDS = 30.0
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not here; the Debian package prometheus has it",
)

AGGREGATED = re.compile(
    r"(?:max|min|sum)(?: by \((?P<by>[^)]*)\))? "
    r"\((?:(?:rate|increase|predict_linear)\()?(?P<name>headgate_\w+)(?:\{(?P<match>[^}]*)\})?"
)
Seen = dict[str, set[str]]
"""The labels of each metric."""


def named_in(query: str) -> Seen:
    """Return every metric of a query with the labels that it groups or chooses by."""
    found: Seen = {name: set() for name in metrics_of(query)}
    for part in AGGREGATED.finditer(query):
        by = set(filter(None, re.split(r", *", part["by"] or "")))
        match = set(re.findall(r"(\w+)=", part["match"] or ""))
        (name,) = metrics_of(part["name"])
        found[name] |= (by | match) - OF_PROMETHEUS
    return found


def all_panels() -> list[Panel]:
    return [panel for row in panels().values() for panel in row]


def all_queries() -> list[str]:
    shown = [query for panel in all_panels() for query in panel.queries.values()]
    return [*shown, *(alert.query for alert in alerts())]


def all_named() -> Seen:
    found: Seen = {}
    for query in all_queries():
        for name, labels in named_in(query).items():
            found.setdefault(name, set()).update(labels)
    return found


def shown_in(text: str) -> Seen:
    """Return every metric of an answer that has a value, with its labels."""
    found: Seen = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            name = sample.name
            if family.type == "histogram":
                name = family.name
            found.setdefault(name, set()).update(set(sample.labels) - {"le"})
    return found


def rare() -> Seen:
    """Return what only a fault or a disk shows, made by the code that answers a fetch."""
    total = UsageTotal(project_id="p", model="m", unpriced_tokens=1)
    silent = SilentKind(Kind("p", "review"), Unit.TOKENS)
    size = StoreSize(used_bytes=1, free_bytes=2, max_bytes=3)
    families = [*usage_metrics([total]), silence_metric([silent]), *store_metrics(size, 0)]
    found = {sample.name: set(sample.labels) for one in families for sample in one.samples}
    return {name: found[name] for name in NOT_IN_DEMO}


NOT_IN_DEMO = (
    "headgate_unpriced_tokens_total",
    "headgate_silent_kinds",
    "headgate_store_free_bytes",
    "headgate_store_room_bytes",
    "headgate_store_max_bytes",
)


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    service = ServiceProcess(tmp_path_factory.mktemp("demo"), "--demo")
    service.start()
    try:
        yield service
    finally:
        service.kill()


@pytest.fixture(scope="module")
def answer(demonstration: ServiceProcess) -> str:
    """Return what a real service answers once it has shown everything that is no fault."""
    wanted = set(METRICS) - set(rare())

    def is_all_there() -> bool:
        return wanted <= set(shown_in(demonstration.text("/metrics")))

    def what() -> str:
        return str(wanted - set(shown_in(demonstration.text("/metrics"))))

    wait_until(is_all_there, seconds=SEEN_SECONDS, what=what)
    return demonstration.text("/metrics")


def test_a_real_answer_has_the_metrics_and_labels_of_the_list(answer: str) -> None:
    kinds = dict(re.findall(r"^# TYPE (headgate_\w+) (\w+)$", answer, re.MULTILINE))
    assert kinds == {name: info.kind for name, info in METRICS.items() if name in kinds}
    shown = shown_in(answer) | rare()
    ours = {name: labels for name, labels in shown.items() if name.startswith("headgate_")}
    assert ours == {name: set(info.labels) for name, info in METRICS.items() if name in ours}


def test_every_metric_and_label_that_a_panel_or_an_alert_names_is_in_a_real_answer(
    answer: str,
) -> None:
    shown = shown_in(answer) | rare()
    for name, labels in all_named().items():
        assert labels <= shown[name], name


def test_every_metric_has_a_panel() -> None:
    assert {name for panel in all_panels() for name in panel.metrics} == set(METRICS)


def test_the_check_of_labels_finds_one_that_is_not_there() -> None:
    query = 'sum by (job, colour) (rate(headgate_calls_total{outcome="done"}[5m]))'
    assert named_in(query) == {"headgate_calls_total": {"colour", "outcome"}}


def test_panels_lie_beside_each_other_and_have_numbers_of_their_own() -> None:
    placed = json.loads(json.dumps(dashboard()))["panels"]
    flat = [*placed, *(inner for row in placed for inner in row.get("panels", ()))]
    assert len({panel["id"] for panel in flat}) == len(flat)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in flat):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    for panel in flat:
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters)
        assert panel["type"] == "row" or (letters and panel["description"])


def test_the_advice_of_an_alert_names_commands_that_exist() -> None:
    said = " ".join(alert.advice for alert in alerts())
    called = re.findall(r"headgate ([a-z-]+)((?: [a-z]+)?)(?: --([a-z-]+))?", said)
    assert called
    for name, inner, option in called:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        if isinstance(command, click.Group) and not command.invoke_without_command:
            command = command.commands[inner.strip()]
        assert not option or f"--{option}" in {text for one in command.params for text in one.opts}


def test_an_alert_says_what_and_what_to_do_about_it() -> None:
    names = [alert.name for alert in alerts()]
    assert len(set(names)) == len(names)
    for alert in alerts():
        assert alert.summary.endswith(".")
        assert alert.advice.endswith(".")
        used = set(re.findall(r"\$labels\.(\w+)", alert.summary))
        assert used <= {"job"} | set.union(*named_in(alert.query).values()), alert.name


def test_the_commands_print_what_programs_read(capsys: pytest.CaptureFixture[str]) -> None:
    printed = {}
    for name in ("list --json", "grafana", "rules", "rules --json", "rules --operator"):
        assert run(["metrics", *name.split()]) == 0
        printed[name] = capsys.readouterr().out
    assert [one["name"] for one in json.loads(printed["list --json"])] == list(METRICS)
    assert json.loads(printed["grafana"]) == json.loads(json.dumps(dashboard()))
    assert yaml.safe_load(printed["rules"]) == json.loads(printed["rules --json"]) == alert_rules()
    wrapped = yaml.safe_load(printed["rules --operator"])
    assert (wrapped["kind"], wrapped["spec"]) == ("PrometheusRule", alert_rules())
    assert run(["metrics", "list"]) == 0
    assert "headgate_call_added_seconds" in capsys.readouterr().out


def concrete(query: str) -> str:
    """Return a query of a panel as Grafana would send it."""
    return query.replace("$__rate_interval", "1m").replace("$job", "headgate")


def promtool(*arguments: str, folder: Path) -> str:
    done = subprocess.run(
        ["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_promtool_accepts_every_alert_and_every_query_of_a_panel(tmp_path: Path) -> None:
    panel_rules = [
        {"record": f"panel:query{number}", "expr": concrete(query)}
        for number, query in enumerate(all_queries())
    ]
    groups = alert_rules()["groups"]
    assert isinstance(groups, list)
    groups = [*groups, {"name": "panels", "rules": panel_rules}]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups}))
    count = len(list(alerts())) + len(panel_rules)
    assert f"{count} rules found" in promtool("check", "rules", "rules.yml", folder=tmp_path)


# What a service shows for an hour, in the notation of promtool, and whether the alert fires then.
COURSES = [
    ("NobodyDispatches", False, "dispatcher{instance='a'} 1x60; dispatcher{instance='b'} 0x60"),
    ("NobodyDispatches", True, "dispatcher{instance='a'} 1x60; dispatcher{instance='b'} 1x60"),
    ("StoreUnreachable", False, "store_up{} 1x60; ledger_up{} 1x60"),
    ("StoreUnreachable", True, "store_up{} 0x60; ledger_up{} 1x60"),
    ("StoreUnreachable", True, "store_up{} 1x60; ledger_up{} 0x60"),
    ("NothingStarts", False, "oldest_queued_seconds{} 0+60x60; dispatches_total{} 0+1x60"),
    ("NothingStarts", True, "oldest_queued_seconds{} 0+60x60; dispatches_total{} 7x60"),
    ("NoCallStarts", False, "calls_waiting{upstream='u'} 3x60; calls_running{upstream='u'} 1x60"),
    ("NoCallStarts", True, "calls_waiting{upstream='u'} 3x60; calls_running{upstream='u'} 0x60"),
    ("BudgetEndsSoonDollars", False, "budget_remaining_usd{scope='s'} 1000-1x60"),
    ("BudgetEndsSoonDollars", True, "budget_remaining_usd{scope='s'} 100-1x60"),
    ("BudgetUsedUpTokens", False, "budget_remaining_tokens{scope='s'} 0x60"),
    ("BudgetUsedUpTokens", True,
     "budget_remaining_tokens{scope='s'} 0x60; budget_limit_tokens{scope='s'} 9x60"),
    ("UpstreamFailing", False,
     "calls_total{outcome='failed'} 0+10x60; calls_total{outcome='done'} 0+60x60"),
    ("UpstreamFailing", True,
     "calls_total{outcome='failed'} 0+30x60; calls_total{outcome='done'} 0+60x60"),
    ("SlotClosedLong", False, "slot_closed{slot='k'} 1x60"),
    ("WebhookBacklog", False, "webhooks{state='pending'} 100x60"),
    ("WebhookBacklog", True, "webhooks{state='pending'} 101x60"),
    ("BudgetUnacceptedDollars", True, "budget_unaccepted_usd{scope='s'} 3x60"),
    ("Overruns", True, "overruns_total{project='p',model='m'} 0+1x60"),
]  # fmt: skip


@needs_promtool
@pytest.mark.parametrize(("name", "fires", "course"), COURSES)
def test_an_alert_fires_when_it_should(name: str, fires: bool, course: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(alert_rules()))
    written = []
    for one in course.split(";"):
        series, values = one.split()
        series = f"headgate_{series}".replace("{", "{job='h',").replace(",}", "}")
        written.append({"series": series.replace("'", '"'), "values": values})
    query = f'count(ALERTS{{alertname="Headgate{name}",alertstate="firing"}}) or vector(0)'
    samples = [{"labels": "{}", "value": int(fires)}]
    test = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": written,
                "promql_expr_test": [{"expr": query, "eval_time": "1h", "exp_samples": samples}],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", "test.yml", folder=tmp_path)


@pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not here; the Debian package of that name has it",
)
def test_a_real_prometheus_answers_every_query_from_a_real_service(
    demonstration: ServiceProcess, answer: str, tmp_path: Path
) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(alert_rules()))
    target = demonstration.address.removeprefix("http://")
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "headgate", "static_configs": [{"targets": [target]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address={address}"]

    def ask(path: str, **query: str) -> list[dict[str, object]]:
        with urlopen(f"http://{address}/api/v1/{path}?{urlencode(query)}", timeout=10) as response:
            data = json.load(response)["data"]
        found: list[dict[str, object]] = data.get("result") or data.get("groups") or []
        return found

    def is_fetched() -> bool:
        try:
            twice = "min(count_over_time(headgate_build_info[1m])) >= 3"
            return bool(ask("query", query=twice))
        except OSError:
            return False

    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log) as process,
    ):
        try:
            wait_until(is_fetched, seconds=PROMETHEUS_SECONDS, what=(tmp_path / "log").read_text)
            (group,) = ask("rules")
            rules = group["rules"]
            assert isinstance(rules, list)
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
            # Some series come and go: those of calls that wait, of the oldest task of a project.
            silent = {
                query
                for panel in all_panels()
                for query in panel.queries.values()
                if not panel.metrics & set(NOT_IN_DEMO)
            }

            def is_answered() -> bool:
                silent.difference_update(
                    {query for query in silent if ask("query", query=concrete(query))}
                )
                return not silent

            wait_until(is_answered, seconds=PROMETHEUS_SECONDS, what=lambda: str(silent))
        finally:
            process.terminate()
