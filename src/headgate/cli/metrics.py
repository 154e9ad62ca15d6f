"""`headgate metrics`: the list of all metrics, and a dashboard and alerts that are made from it.

Rule: a query is made from entries of the list, which says how the values of several nodes become
one. A metric that no panel names has a panel of its own at the end, so that none is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Literal, NamedTuple

import click

from headgate.cli.connection import json_option
from headgate.cli.output import print_json, print_table


@click.group()
def metrics() -> None:
    """List all metrics; print a Grafana dashboard and Prometheus alerts made from the list."""


@metrics.command(
    "list",
    epilog="""\b
Examples:
  headgate metrics list
  headgate metrics list --json | jq -r '.[].name'
""",
)
@json_option
def list_(*, as_json: bool) -> None:
    """Print every metric of GET /metrics, with its labels."""
    from headgate.metrics import METRICS  # noqa: PLC0415  not for a list of commands

    if as_json:
        print_json([one._asdict() for one in METRICS.values()])
        return
    rows = [
        (one.name, one.kind, ", ".join(one.labels), one.across, one.text)
        for one in METRICS.values()
    ]
    header = ("metric", "type", "labels", "over nodes", "what it says")
    print_table("Metrics", header, rows, whole=("metric",))


@metrics.command(
    epilog="""\b
Examples:
  headgate metrics grafana > headgate-dashboard.json
"""
)
@click.option("--json", "as_json", is_flag=True, help="No effect: the output is always JSON.")
def grafana(*, as_json: bool) -> None:  # noqa: ARG001 - a dashboard is JSON anyway
    """Print a dashboard as a file that Grafana can import."""
    print_json(dashboard())


@metrics.command(
    epilog="""\b
Examples:
  headgate metrics rules > headgate-rules.yml && promtool check rules headgate-rules.yml
  headgate metrics rules --operator | kubectl apply -f -
"""
)
@click.option("--operator", is_flag=True, help="As a PrometheusRule of the Prometheus operator.")
@json_option
def rules(*, operator: bool, as_json: bool) -> None:
    """Print alerts for Prometheus, as a file that rule_files names."""
    found = prometheus_rule() if operator else alert_rules()
    if as_json:
        print_json(found)
        return
    import yaml  # noqa: PLC0415  not for a list of commands

    click.echo(yaml.safe_dump(found, sort_keys=False, width=100), nl=False)


# Queries of PromQL.


class Queries(NamedTuple):
    """Writes queries: a dashboard chooses one service by its `job`, an alert tells them apart."""

    matcher: str = ""
    by: tuple[str, ...] = ()
    window: str = "$__rate_interval"

    def value(self, name: str, *by: str, **match: str) -> str:
        """Return what a gauge shows."""
        return self._across(name, self._series(name, match), by)

    def rate(self, name: str, *by: str, window: str = "", **match: str) -> str:
        """Return how fast a counter grows, per second."""
        series = self._series(name, match)
        return self._across(name, f"rate({series}[{window or self.window}])", by)

    def increase(self, name: str, *by: str, window: str, **match: str) -> str:
        """Return by how much a counter has grown."""
        return self._across(name, f"increase({self._series(name, match)}[{window}])", by)

    def quantile(self, share: float, name: str, *by: str) -> str:
        """Return the time that a share of those in a histogram stayed below."""
        series = self._series(f"{name}_bucket", {})
        summed = self._across(name, f"rate({series}[{self.window}])", (*by, "le"))
        return f"histogram_quantile({share}, {summed})"

    def _series(self, name: str, match: dict[str, str]) -> str:
        pairs = [f'{label}="{value}"' for label, value in match.items()]
        matchers = ",".join(filter(None, (self.matcher, *pairs)))
        return f"{name}{{{matchers}}}" if matchers else name

    def _across(self, name: str, series: str, by: tuple[str, ...]) -> str:
        from headgate.metrics import METRICS  # noqa: PLC0415

        labels = (*self.by, *by)
        grouped = f" by ({', '.join(labels)})" if labels else ""
        return f"{METRICS[name].across}{grouped} ({series})"


# The dashboard for Grafana.

QUANTILES = {"half": 0.5, "95 of 100": 0.95, "99 of 100": 0.99}
DASHBOARD_SCHEMA = 39
WIDTH = 24
_SHOWN = Queries(matcher='job="$job"')
_PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """One picture: its queries, by what the legend calls them."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"

    @property
    def metrics(self) -> set[str]:
        """The metrics that it shows."""
        return metrics_of(" ".join(self.queries.values()))

    @property
    def width(self) -> int:
        """How many of the 24 columns it takes."""
        return 3 if self.kind == "stat" else 8

    @property
    def height(self) -> int:
        """How many rows it takes."""
        return 4 if self.kind == "stat" else 8

    def json(self) -> dict[str, object]:
        """Return it as Grafana reads it, without its place and number."""
        from headgate.metrics import METRICS  # noqa: PLC0415

        texts = dict.fromkeys(METRICS[name].text for name in sorted(self.metrics))
        return {
            "type": self.kind,
            "title": self.title,
            "description": " ".join(texts),
            "datasource": _PROMETHEUS,
            "fieldConfig": {"defaults": {"unit": self.unit}, "overrides": []},
            "options": self._options(),
            "targets": [
                {
                    "refId": chr(ord("A") + number),
                    "datasource": _PROMETHEUS,
                    "expr": query,
                    "legendFormat": legend,
                    "instant": self.kind == "stat",
                    "range": self.kind != "stat",
                }
                for number, (legend, query) in enumerate(self.queries.items())
            ],
        }

    def _options(self) -> dict[str, object]:
        if self.kind == "stat":
            return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }


def metrics_of(query: str) -> set[str]:
    """Return the metrics of the list that a query names."""
    from headgate.metrics import METRICS  # noqa: PLC0415

    names = set(re.findall(r"headgate_\w+", query))
    return {name if name in METRICS else name.removesuffix("_bucket") for name in names}


def _by(name: str, *by: str) -> dict[str, str]:
    """Return one query with a line for each value of these labels."""
    from headgate.metrics import METRICS  # noqa: PLC0415

    query = _SHOWN.rate if METRICS[name].kind == "counter" else _SHOWN.value
    return {" ".join(f"{{{{{label}}}}}" for label in by) or "all": query(name, *by)}


def _quantiles(name: str, *by: str) -> dict[str, str]:
    labels = "".join(f"{{{{{label}}}}} " for label in by)
    return {
        f"{labels}{title}": _SHOWN.quantile(share, name, *by) for title, share in QUANTILES.items()
    }


def _now() -> list[Panel]:
    spend = _SHOWN.increase("headgate_spend_usd_total", "project", "model", "kind", window="24h")
    found = (
        ("Tasks waiting", _SHOWN.value("headgate_tasks_queued"), "short"),
        ("Tasks running", _SHOWN.value("headgate_tasks_inflight"), "short"),
        ("Oldest task waits", _SHOWN.value("headgate_oldest_queued_seconds"), "s"),
        ("Calls waiting", _SHOWN.value("headgate_calls_waiting"), "short"),
        ("Calls running", _SHOWN.value("headgate_calls_running"), "short"),
        ("Spent in 24 hours", f"sum({spend})", "currencyUSD"),
        ("Nodes ready", f"count({_SHOWN.value('headgate_ready', 'instance')} == 1)", "short"),
        ("Dispatchers", _SHOWN.value("headgate_dispatcher"), "short"),
    )
    return [Panel(title, {title: query}, unit, "stat") for title, query, unit in found]


def _tasks() -> list[Panel]:
    waited = _SHOWN.rate("headgate_project_dispatch_latency_seconds_total", "project")
    started = _SHOWN.rate("headgate_project_dispatches_total", "project")
    target = _SHOWN.value("headgate_project_share_target", "project")
    actual = _SHOWN.value("headgate_project_share_actual", "project")
    ends = ("completed", "failed", "cancelled", "rejected", "expired")
    return [
        Panel("Tasks waiting, by project", _by("headgate_project_tasks_queued", "project")),
        Panel("Starts a second, by project", _by("headgate_project_dispatches_total", "project")),
        Panel("Mean wait, by project", {"{{project}}": f"{waited} / {started}"}, "s"),
        Panel("Wait before a start", _quantiles("headgate_task_wait_seconds"), "s"),
        Panel("Run time", _quantiles("headgate_task_run_seconds"), "s"),
        Panel(
            "Oldest task waits, by project",
            _by("headgate_project_oldest_queued_seconds", "project"),
            "s",
        ),
        Panel("Why: what is closed now", _by("headgate_closures", "kind", "cause")),
        Panel(
            "Why: a budget had no room, times a second",
            _by("headgate_budget_rejections_total", "scope", "reason"),
        ),
        Panel(
            "Why: turned away by a full queue or store, tasks a second",
            _by("headgate_queue_rejections_total", "limit")
            | {"store": _SHOWN.rate("headgate_store_rejections_total")},
        ),
        Panel("Ends a second", {one: _SHOWN.rate(f"headgate_tasks_{one}_total") for one in ends}),
        Panel(
            "Share of each project, less what it should have",
            {"{{project}}": f"{actual} - {target}"},
            "percentunit",
        ),
    ]


def _money() -> list[Panel]:
    rate = "headgate_spend_usd_total"
    projects = _SHOWN.rate(rate, "project", "model", "kind")
    used = " + ".join(
        _SHOWN.value(f"headgate_budget_{amount}_usd", "scope")
        for amount in ("spent", "reserved", "overrun")
    )
    limit = _SHOWN.value("headgate_budget_limit_usd", "scope")
    return [
        Panel(
            "Dollars an hour, by project",
            {"{{project}}": f"3600 * sum by (project) ({projects})"},
            "currencyUSD",
        ),
        Panel(
            "Dollars an hour, by model",
            {"{{model}}": f"3600 * sum by (model) ({projects})"},
            "currencyUSD",
        ),
        Panel(
            "Dollars an hour that nobody reported",
            {"{{project}}": f"3600 * {_SHOWN.rate(rate, 'project', kind='assumed')}"},
            "currencyUSD",
        ),
        Panel("Share of a limit that is used", {"{{scope}}": f"({used}) / {limit}"}, "percentunit"),
        *(
            Panel(f"Budgets: dollars {title}", _by(f"headgate_budget_{name}", *by), "currencyUSD")
            for title, name, by in (
                ("left", "remaining_usd", ("scope",)),
                ("spent", "spent_usd", ("scope",)),
                ("reserved", "reserved_usd", ("scope",)),
                ("limit", "limit_usd", ("scope",)),
                ("beyond the reservation", "overrun_usd", ("scope",)),
                ("claimed and not accepted", "unaccepted_usd", ("scope",)),
            )
        ),
        Panel("Budgets: tokens left", _by("headgate_budget_remaining_tokens", "scope")),
    ]


def _calls() -> list[Panel]:
    labels = ("upstream", "model")
    return [
        Panel("Calls a second", _by("headgate_calls_total", *labels, "outcome")),
        Panel("Calls waiting", _by("headgate_calls_waiting", "upstream")),
        Panel("Calls running", _by("headgate_calls_running", "upstream")),
        Panel(
            "Calls a second, by project", _by("headgate_project_calls_total", "project", "outcome")
        ),
        Panel("Calls waiting, by project", _by("headgate_project_calls_waiting", "project")),
        Panel("Wait of a call", _quantiles("headgate_call_wait_seconds", "upstream"), "s"),
        Panel(
            "Time to the first byte", _quantiles("headgate_call_first_byte_seconds", *labels), "s"
        ),
        Panel("Added by Headgate", _quantiles("headgate_call_added_seconds"), "s"),
        Panel("Tokens a second", _by("headgate_call_tokens_total", *labels, "kind")),
        Panel(
            "Dollars an hour",
            {
                "{{upstream}} {{model}}": (
                    f"3600 * {_SHOWN.rate('headgate_call_cost_usd_total', *labels)}"
                )
            },
            "currencyUSD",
        ),
    ]


def _slots() -> list[Panel]:
    resets = _SHOWN.value("headgate_slot_reset_timestamp_seconds", "slot")
    return [
        Panel("Window used", _by("headgate_slot_percent_used", "slot"), "percent"),
        Panel("Window resets in", {"{{slot}}": f"{resets} - time()"}, "s"),
        Panel(
            "Closed (1) and disabled (1)",
            {
                "{{slot}} closed": _SHOWN.value("headgate_slot_closed", "slot"),
                "{{slot}} disabled": _SHOWN.value("headgate_slot_disabled", "slot"),
            },
        ),
        Panel("Polls a second", _by("headgate_slot_polls_total", "slot", "outcome")),
        Panel("Wakes a second", _by("headgate_slot_wakes_total", "slot", "outcome")),
        Panel("Polls that failed in a row", _by("headgate_slot_poll_errors", "slot")),
    ]


def _service() -> list[Panel]:
    return [
        Panel("Dispatcher", _by("headgate_dispatcher", "instance")),
        Panel(
            "Store and ledger answer (1)",
            {
                "{{instance}} store": _SHOWN.value("headgate_store_up", "instance"),
                "{{instance}} ledger": _SHOWN.value("headgate_ledger_up", "instance"),
            },
        ),
        Panel("Elections", _by("headgate_dispatcher_epoch")),
        Panel("Webhooks kept", _by("headgate_webhooks", "state")),
        Panel(
            "Room of the store",
            {one: _SHOWN.value(f"headgate_store_{one}_bytes") for one in ("used", "free", "room")},
            "bytes",
        ),
        Panel("Writes that wait", _by("headgate_writer_queue", "instance")),
    ]


def _rest(shown: set[str]) -> list[Panel]:
    """Return a panel for each metric that no other panel shows."""
    from headgate.metrics import METRICS  # noqa: PLC0415

    return [
        Panel(
            name.removeprefix("headgate_").replace("_", " "),
            _quantiles(name, *info.labels) if info.kind == "histogram" else _by(name, *info.labels),
        )
        for name, info in METRICS.items()
        if name not in shown
    ]


def panels() -> dict[str, list[Panel]]:
    """Return all panels, by the title of their row."""
    rows = {
        "Now": _now(),
        "Tasks: how many wait, how long and why": _tasks(),
        "Money": _money(),
        "Calls of models": _calls(),
        "Key slots": _slots(),
        "Service": _service(),
    }
    shown = {name for row in rows.values() for panel in row for name in panel.metrics}
    return rows | {"Everything else": _rest(shown)}


def dashboard() -> dict[str, object]:
    """Return the dashboard as Grafana imports it."""
    return {
        "uid": "headgate",
        "title": "Headgate",
        "tags": ["headgate"],
        "schemaVersion": DASHBOARD_SCHEMA,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "job",
                    "label": "Service",
                    "type": "query",
                    "datasource": _PROMETHEUS,
                    "query": {"query": "label_values(headgate_build_info, job)", "refId": "job"},
                    "refresh": 2,
                },
            ]
        },
        "panels": list(_placed(panels())),
    }


def _placed(rows: dict[str, list[Panel]]) -> Iterator[dict[str, object]]:
    """Yield every row and panel with a number and a place; only the last row is folded."""
    numbers = count(1)
    y = 0
    for title, row in rows.items():
        is_folded = title == list(rows)[-1]
        head = {
            "id": next(numbers),
            "type": "row",
            "title": title,
            "collapsed": is_folded,
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
        }
        y += 1
        placed = []
        x = 0
        for panel in row:
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            placed.append({"id": next(numbers), "gridPos": place, **panel.json()})
            x += panel.width
            if x + panel.width > WIDTH or panel is row[-1]:
                x, y = 0, y + panel.height
        yield {**head, "panels": placed if is_folded else []}
        if not is_folded:
            yield from placed


# Alerts for Prometheus.

_ALERTED = Queries(by=("job",))


class Alert(NamedTuple):
    """Something that a person should look at: `lasts` is how long it goes on before."""

    name: str
    query: str
    lasts: str
    summary: str
    advice: str
    severity: Literal["critical", "warning"] = "warning"

    def json(self) -> dict[str, object]:
        """Return it as Prometheus reads it."""
        return {
            "alert": f"Headgate{self.name}",
            "expr": self.query,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.advice},
        }


def alerts() -> Iterator[Alert]:
    """Yield all alerts."""
    yield from _service_alerts()
    yield from _work_alerts()
    for unit in ("usd", "tokens"):
        yield from _budget_alerts(unit)


def _service_alerts() -> Iterator[Alert]:
    value = _ALERTED.value
    yield Alert(
        "NotScraped",
        "absent(headgate_build_info)",
        "5m",
        "Prometheus gets no metrics of Headgate.",
        "Look whether the service runs, and whether the token of the scrape is still good.",
        "critical",
    )
    yield Alert(
        "NobodyDispatches",
        f"{value('headgate_dispatcher')} != 1",
        "1m",
        "{{ $value }} nodes of {{ $labels.job }} dispatch; it should be one.",
        "Nothing starts without a dispatcher. GET /readyz of each node says what is wrong.",
        "critical",
    )
    yield Alert(
        "StoreUnreachable",
        f"{value('headgate_store_up')} == 0 or {value('headgate_ledger_up')} == 0",
        "1m",
        "The store or the ledger of {{ $labels.job }} does not answer.",
        "Nothing is granted until it does. The log of the node has the reason.",
        "critical",
    )
    yield Alert(
        "StoreNearlyFull",
        f"{value('headgate_store_room_bytes')} < 256 * 1024 * 1024",
        "5m",
        "The store of {{ $labels.job }} has {{ $value | humanize1024 }}B left for new tasks.",
        "Free space on its disk or raise max_store_bytes; new tasks are refused when it is full.",
    )
    yield Alert(
        "WebhookBacklog",
        f"{value('headgate_webhooks', state='pending')} > 100",
        "15m",
        "{{ $value }} webhooks of {{ $labels.job }} wait to be delivered.",
        "headgate webhooks list --state pending names the receivers that do not answer.",
    )
    yield Alert(
        "WebhooksGivenUp",
        f"{value('headgate_webhooks', state='dead')} > 0",
        "0m",
        "{{ $value }} webhooks of {{ $labels.job }} were given up.",
        "headgate webhooks list --state dead lists them; webhooks redeliver sends them again.",
    )


def _work_alerts() -> Iterator[Alert]:
    value, rate, increase = _ALERTED.value, _ALERTED.rate, _ALERTED.increase
    yield Alert(
        "NothingStarts",
        f"{value('headgate_oldest_queued_seconds')} > 600"
        f" and {increase('headgate_dispatches_total', window='10m')} == 0",
        "5m",
        "Tasks of {{ $labels.job }} wait, and none has started for ten minutes.",
        "headgate why TASK says what it waits for: a budget, a key, a paused project.",
    )
    yield Alert(
        "NoCallStarts",
        f"{value('headgate_calls_waiting', 'upstream')} > 0"
        f" and {value('headgate_calls_running', 'upstream')} == 0",
        "10m",
        "Calls to {{ $labels.upstream }} wait, and none runs.",
        "headgate calls --state waiting lists them; headgate why CALL says what they wait for.",
    )
    yield Alert(
        "TurnsTasksAway",
        f"{rate('headgate_tasks_rejected_total', window='5m')} > 0",
        "5m",
        "{{ $labels.job }} turns tasks away.",
        "headgate_queue_rejections_total says which limit; headgate stats shows the limits.",
    )
    yield Alert(
        "TasksFail",
        f"{rate('headgate_tasks_failed_total', window='15m')}"
        f" > 0.2 * {rate('headgate_dispatches_total', window='15m')}",
        "15m",
        "More than a fifth of the tasks of {{ $labels.job }} fail.",
        "headgate tasks --state failed lists them with their errors.",
    )
    yield Alert(
        "UpstreamFailing",
        f"{rate('headgate_calls_total', 'upstream', window='10m', outcome='failed')}"
        f" > 0.2 * {rate('headgate_calls_total', 'upstream', window='10m')}",
        "5m",
        "More than a fifth of the calls to {{ $labels.upstream }} fail.",
        "headgate calls --state failed shows what the provider answered.",
    )
    yield Alert(
        "SlotClosedLong",
        f"{value('headgate_slot_closed', 'slot')} == 1",
        "6h",
        "The slot {{ $labels.slot }} has been closed for six hours.",
        "Its window should have reset by now: look whether it is paused, disabled or refused.",
    )
    yield Alert(
        "SlotNotRead",
        f"{value('headgate_slot_poll_errors', 'slot')} >= 5",
        "5m",
        "The quota of the slot {{ $labels.slot }} could not be read {{ $value }} times in a row.",
        "headgate slot log SLOT shows what its provider answered.",
    )
    yield Alert(
        "CostUnseen",
        f"{value('headgate_silent_kinds', 'project', 'target')} > 0",
        "0m",
        "Work of {{ $labels.project }} on {{ $labels.target }} reports no cost to its budget.",
        "Have the target report what it used, or set an estimate for it.",
    )
    yield Alert(
        "ModelUnpriced",
        f"{increase('headgate_unpriced_tokens_total', 'project', 'model', window='1h')} > 0",
        "0m",
        "The model {{ $labels.model }} has no price, so what was reserved was booked.",
        "Add the price to [prices] of the settings.",
    )
    yield Alert(
        "Overruns",
        f"{increase('headgate_overruns_total', 'project', 'model', window='1h')} > 10",
        "0m",
        "{{ $labels.model }} cost more than was reserved {{ $value | humanize }} times in an hour.",
        "Raise the estimate of this work, or set reserve to strict.",
    )


def _budget_alerts(unit: str) -> Iterator[Alert]:
    word = "Dollars" if unit == "usd" else "Tokens"
    remaining = f"headgate_budget_remaining_{unit}"
    left = _ALERTED.value(remaining, "scope")
    yield Alert(
        f"BudgetEndsSoon{word}",
        f"min by (job, scope) (predict_linear({remaining}[1h], 4 * 3600)) < 0 and {left} > 0",
        "10m",
        f"The budget {{{{ $labels.scope }}}} runs out of {word.lower()} within four hours.",
        "At the pace of the last hour. Raise the limit, or expect its work to wait or be refused.",
    )
    yield Alert(
        f"BudgetUsedUp{word}",
        f"{left} <= 0 and {_ALERTED.value(f'headgate_budget_limit_{unit}', 'scope')} > 0",
        "5m",
        f"The budget {{{{ $labels.scope }}}} has no {word.lower()} left.",
        "Its work waits for the reset of its window, or is refused where there is none.",
    )
    yield Alert(
        f"BudgetOverrun{word}",
        f"{_ALERTED.value(f'headgate_budget_overrun_{unit}', 'scope')}"
        f" > 0.1 * {_ALERTED.value(f'headgate_budget_limit_{unit}', 'scope')}",
        "5m",
        f"The budget {{{{ $labels.scope }}}} spent a tenth of its {word.lower()} beyond"
        " what was reserved.",
        "Raise the estimates of its work, or set reserve to strict.",
    )
    yield Alert(
        f"BudgetUnaccepted{word}",
        f"{_ALERTED.value(f'headgate_budget_unaccepted_{unit}', 'scope')} > 0",
        "5m",
        f"Tenants claim {word.lower()} in {{{{ $labels.scope }}}} beyond their own limits.",
        "An operator accepts or rejects the claims.",
    )


def alert_rules() -> dict[str, object]:
    """Return the alerts as a file of rules."""
    return {"groups": [{"name": "headgate", "rules": [one.json() for one in alerts()]}]}


def prometheus_rule() -> dict[str, object]:
    """Return the alerts as the object that the Prometheus operator reads."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "headgate", "labels": {"app.kubernetes.io/name": "headgate"}},
        "spec": alert_rules(),
    }
