"""What is deployed: the image, compose files, manifests for Kubernetes, the action for GitHub.

Nothing here runs a container or a cluster. Files are held against the schemas of those who read
them; scripts and commands in them run for real, in a plain environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import click
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from doc_pages import ROOT, blocks_of
from executors.endpoint import free_port
from headgate.api.status import ROUTES
from headgate.cli.main import cli
from headgate.cli.metrics import alerts
from headgate.client.worker import LEAVE_SECONDS
from headgate.config import load_settings
from headgate.config.settings import DEFAULT_PORT, SchedulerSettings
from service.fake_providers import fake_provider
from service.support import ServiceProcess, running_service, wait_until

DEPLOY = ROOT / "deploy"
CONTAINERFILE = DEPLOY / "Containerfile"
COMPOSE = (DEPLOY / "compose.yaml", DEPLOY / "compose.stack.yaml")
KUBERNETES = DEPLOY / "kubernetes"
MANIFESTS = [
    path
    for path in [
        *sorted(KUBERNETES.glob("base/*.yaml")),
        KUBERNETES / "postgres/disruption.yaml",
        KUBERNETES / "workers/deployment.yaml",
    ]
    if path.name != "kustomization.yaml"
]
KUBERNETES_VERSION = "1.34"
ACTION = DEPLOY / "github-action"
CI_PAGE = ROOT / "docs/how-to/limit-ci-jobs.md"
DRAIN_SECONDS = SchedulerSettings().drain_seconds
BIN = Path(sys.executable).parent


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def check_schema(name: str, *paths: Path) -> None:
    """Hold files against one of the schemas that come with check-jsonschema."""
    done = subprocess.run(
        [BIN / "check-jsonschema", "--builtin-schema", f"vendor.{name}", *paths],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def services() -> dict[str, dict[str, Any]]:
    """Return the services of both compose files, as the second one goes over the first."""
    found: dict[str, dict[str, Any]] = {}
    for path in COMPOSE:
        for name, service in loaded(path)["services"].items():
            before = found.setdefault(name, {})
            variables = before.get("environment", []) + service.get("environment", [])
            found[name] = before | service | {"environment": variables}
    return found


def test_the_container_file_has_no_faults() -> None:
    done = subprocess.run(
        [BIN / "hadolint", CONTAINERFILE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_container_runs_as_nobody_in_particular_and_says_whether_it_is_alive() -> None:
    text = CONTAINERFILE.read_text()
    lines = text.splitlines()
    assert "USER 10001" in lines
    assert 'VOLUME ["/data"]' in lines
    assert f"EXPOSE {DEFAULT_PORT}" in lines
    assert f"http://127.0.0.1:{DEFAULT_PORT}/livez" in text
    assert lines.index("USER 10001") < lines.index('ENTRYPOINT ["headgate"]')
    assert not re.search(r"(?i)token=|password|secret|api_key", text)


def test_what_the_container_copies_exists() -> None:
    for names in re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE.read_text(), re.MULTILINE):
        for name in names.split():
            assert (ROOT / name).exists()


def test_the_extras_of_the_container_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (named,) = re.findall(r"^ARG PACKAGE=\.\[([a-z,]+)\]$", CONTAINERFILE.read_text(), re.MULTILINE)
    assert set(named.split(",")) <= project["optional-dependencies"].keys()


def test_the_command_of_the_container_serves_is_healthy_and_drains(tmp_path: Path) -> None:
    port = free_port()
    text = CONTAINERFILE.read_text().replace("\\\n", "").replace(str(DEFAULT_PORT), str(port))
    check = json.loads(re.findall(r"^HEALTHCHECK .* CMD (.+)$", text, re.MULTILINE)[0])
    arguments = json.loads(re.findall(r"^CMD (.+)$", text, re.MULTILINE)[0])
    assert arguments == ["up", "--host", "0.0.0.0", "--data", "/data"]
    service = ServiceProcess(tmp_path, *arguments[1:-1], str(tmp_path / "data"), port=port)
    service.start()
    try:
        subprocess.run([sys.executable, *check[1:]], check=True)
        assert service.stop() == 0
    finally:
        service.kill()
    assert subprocess.run([sys.executable, *check[1:]], check=False, capture_output=True).returncode


def test_compose_files_follow_the_specification() -> None:
    check_schema("compose-spec", *COMPOSE)


def test_what_compose_mounts_and_names_is_there() -> None:
    volumes = {name for path in COMPOSE for name in loaded(path)["volumes"]}
    for service in services().values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            is_own = source.startswith("./") and source != "./settings"
            assert (DEPLOY / source).is_file() if is_own else source in {*volumes, "./settings"}
        assert set(service.get("depends_on", ())) <= set(services())


def test_compose_stops_the_service_after_it_has_drained() -> None:
    assert int(services()["headgate"]["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS


def test_compose_asks_for_health_as_the_image_does() -> None:
    text = CONTAINERFILE.read_text().replace("\\\n", "")
    own = json.loads(re.findall(r"^HEALTHCHECK .* CMD (.+)$", text, re.MULTILINE)[0])
    assert services()["headgate"]["healthcheck"]["test"] == ["CMD", *own]


def test_a_service_starts_with_the_variables_of_compose() -> None:
    given = dict(one.split("=", 1) for one in services()["headgate"]["environment"] if "=" in one)
    filled = {name: re.sub(r"\$\{[^}]*\}", "secret", value) for name, value in given.items()}
    settings = load_settings(None, filled, {})
    assert settings.store.url == "postgresql://headgate:secret@postgres/headgate"
    assert settings.ledger.url == "redis://valkey:6379/0"


class Stack(NamedTuple):
    """The service of the larger compose file, and where the files for monitoring lie."""

    service: ServiceProcess
    data: Path
    monitoring: Path


@pytest.fixture
def stack(tmp_path: Path, postgres_url: str, valkey_url: str) -> Iterator[Stack]:
    """Run the service of the larger compose file, on real servers, and what writes the files."""
    writer = services()["monitoring-files"]
    assert writer["entrypoint"] == ["sh", "-ec"]
    (script,) = writer["command"]
    found = Stack(
        ServiceProcess(
            tmp_path,
            *("--data", str(tmp_path / "data"), "--host", "0.0.0.0"),
            *("--store", postgres_url, "--ledger", valkey_url),
        ),
        tmp_path / "data",
        tmp_path / "monitoring",
    )
    found.monitoring.mkdir()
    found.service.start()
    try:
        places = {
            "$$": "$",
            "/monitoring": str(found.monitoring),
            "/data": str(found.data),
            "http://headgate:7420": found.service.address,
        }
        for place, here in places.items():
            script = script.replace(place, here)
        # The second time is another start of the same stack.
        for _ in range(2):
            subprocess.run(["sh", "-ec", script], check=True, env=environment())
        yield found
    finally:
        found.service.kill()


def test_compose_writes_the_files_that_prometheus_and_grafana_read(stack: Stack) -> None:
    names = {path.name for path in stack.monitoring.iterdir()}
    assert names == {"rules.yml", "headgate.json", "token"}
    stack.service.token = (stack.data / "token").read_text().strip()
    tokens = stack.service.ask("GET", "/tokens").body["tokens"]
    permissions = [one["permissions"] for one in tokens if one["name"].startswith("prometheus-")]
    assert permissions == [["read"]]
    (provider,) = loaded(DEPLOY / "monitoring/grafana-dashboards.yml")["providers"]
    assert provider["options"]["path"] == "/monitoring"
    (source,) = loaded(DEPLOY / "monitoring/grafana-datasource.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"


@pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not here; the Debian package of that name has it",
)
def test_prometheus_scrapes_the_stack_and_loads_the_alerts(stack: Stack, tmp_path: Path) -> None:
    text = (DEPLOY / "monitoring/prometheus.yml").read_text()
    for place, here in (
        ("/monitoring", str(stack.monitoring)),
        ("headgate:7420", stack.service.address.removeprefix("http://")),
        ("15s", "1s"),
    ):
        assert place in text
        text = text.replace(place, here)
    (tmp_path / "prometheus.yml").write_text(text)
    subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, check=True)
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address={address}"]

    def asked(path: str) -> Any:
        try:
            with urlopen(f"http://{address}/api/v1/{path}", timeout=10) as response:
                return json.load(response)["data"]
        except OSError:
            return {}

    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log) as process,
    ):
        try:
            wait_until(
                lambda: asked("query?query=headgate_ready==1").get("result"),
                seconds=30.0,
                what=(tmp_path / "log").read_text,
            )
            (group,) = asked("rules")["groups"]
            assert len(group["rules"]) == len(list(alerts()))
        finally:
            process.terminate()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_manifests_follow_the_schema_of_kubernetes(path: Path) -> None:
    kubernetes_validate.validate(loaded(path), KUBERNETES_VERSION, strict=True)


def container() -> dict[str, Any]:
    found: dict[str, Any] = pod()["containers"][0]
    return found


def pod() -> dict[str, Any]:
    found: dict[str, Any] = loaded(KUBERNETES / "base/deployment.yaml")["spec"]["template"]["spec"]
    return found


def test_probes_ask_routes_that_exist() -> None:
    for name, path in (("startup", "/livez"), ("liveness", "/livez"), ("readiness", "/readyz")):
        probe = container()[f"{name}Probe"]["httpGet"]
        assert probe == {"path": path, "port": "http"}
        assert path in {route.path for route in ROUTES}
    assert container()["ports"] == [{"name": "http", "containerPort": DEFAULT_PORT}]


def test_kubernetes_stops_a_pod_after_it_has_drained() -> None:
    settings = load_settings(KUBERNETES / "base/headgate.toml", {}, {})
    assert pod()["terminationGracePeriodSeconds"] > settings.scheduler.drain_seconds


def test_a_sqlite_file_has_one_pod_and_postgresql_has_two() -> None:
    alone = loaded(KUBERNETES / "base/deployment.yaml")["spec"]
    assert (alone["replicas"], alone["strategy"]["type"]) == (1, "Recreate")
    several = loaded(KUBERNETES / "postgres/deployment.yaml")["spec"]
    assert (several["replicas"], several["strategy"]["type"]) == (2, "RollingUpdate")
    assert loaded(KUBERNETES / "postgres/disruption.yaml")["spec"]["minAvailable"] == 1


def test_what_kustomizations_name_is_there() -> None:
    for path in KUBERNETES.glob("*/kustomization.yaml"):
        found = loaded(path)
        patches = [one["path"] for one in found.get("patches", ()) if "path" in one]
        for name in [*found["resources"], *patches]:
            assert (path.parent / name).exists(), name


def worker_arguments() -> list[str]:
    """Return the arguments of the worker that is deployed."""
    template = loaded(KUBERNETES / "workers/deployment.yaml")["spec"]["template"]["spec"]
    arguments: list[str] = template["containers"][0]["args"]
    return arguments


def scaling_queries() -> list[str]:
    """Return what the number of workers goes by."""
    triggers = loaded(KUBERNETES / "workers/scaledobject.yaml")["spec"]["triggers"]
    return [trigger["metadata"]["query"] for trigger in triggers]


def test_the_worker_is_called_as_it_takes_it_and_is_stopped_after_it_has_drained() -> None:
    name, *options = worker_arguments()
    parsed = cli.get_command(click.Context(cli), name)
    assert parsed is not None
    given = parsed.make_context(name, list(options)).params
    template = loaded(KUBERNETES / "workers/deployment.yaml")["spec"]["template"]["spec"]
    assert template["terminationGracePeriodSeconds"] > given["drain_seconds"] + LEAVE_SECONDS
    (first, _) = loaded(KUBERNETES / "workers/scaledobject.yaml")["spec"]["triggers"]
    assert int(first["metadata"]["threshold"]) == given["capacity"]
    assert all(f'{{agent="{given["agent_id"]}"}}' in query for query in scaling_queries())


def test_the_scaled_object_has_what_keda_asks_for() -> None:
    scaled = loaded(KUBERNETES / "workers/scaledobject.yaml")
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    workers = loaded(KUBERNETES / "workers/deployment.yaml")
    assert scaled["spec"]["scaleTargetRef"]["name"] == workers["metadata"]["name"]
    assert "replicas" not in workers["spec"]
    for trigger in scaled["spec"]["triggers"]:
        assert trigger["type"] == "prometheus"
        assert trigger["metricType"] in ("AverageValue", "Value")
        assert {"serverAddress", "query", "threshold"} <= set(trigger["metadata"])
        assert all(isinstance(value, str) for value in trigger["metadata"].values())


def settings_for_workers() -> str:
    """Return the settings of the base with the lines that its workers need."""
    text = (KUBERNETES / "base/headgate.toml").read_text()
    return re.sub(r"^# (\[agents\..+\]|target = .+)$", r"\1", text, flags=re.MULTILINE)


def test_the_base_has_the_lines_that_its_workers_need(tmp_path: Path) -> None:
    name, *options = worker_arguments()
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    agent = command.make_context(name, list(options)).params["agent_id"]
    path = tmp_path / "headgate.toml"
    path.write_text(settings_for_workers())
    settings = load_settings(path, {}, {})
    assert {one: named.target for one, named in settings.agents.items()} == {agent: "pull"}
    assert not load_settings(KUBERNETES / "base/headgate.toml", {}, {}).agents


def test_workers_are_not_scaled_by_tasks_that_a_worker_could_not_start(tmp_path: Path) -> None:
    """What waits for its time, a pause or a budget needs no worker; what only lacks one does."""
    settings = tmp_path / "headgate.toml"
    small = '[projects.small]\n[budgets."project:small"]\nlimit_tokens = 10\n[projects.held]\n'
    settings.write_text(settings_for_workers() + small)

    def shown(kind: str) -> float:
        text = service.text("/metrics")
        line = f'headgate_agent_tasks_{kind}{{agent="coder-1"}} '
        return next((float(one[len(line) :]) for one in text.splitlines() if line in one), -1)

    with running_service(tmp_path, "--config", str(settings)) as service:
        assert service.ask("PATCH", "/projects/held", {"status": "paused"}).status == 200
        service.submit(agentId="coder-1")
        service.submit(agentId="coder-1", projectId="held")
        service.submit(agentId="coder-1", notBefore="2100-01-01T00:00:00Z")
        service.submit(agentId="coder-1", projectId="small", estimate={"tokens": 8})
        wait_until(lambda: shown("ready") == 2, seconds=20.0, what=lambda: str(shown("ready")))
        assert shown("queued") == 4
        claim = {"capacity": 4, "waitSeconds": 5}
        claimed = service.ask("POST", "/agents/coder-1/claim", claim).body
        wait_until(lambda: shown("inflight") == 2, seconds=20.0, what=lambda: str(claimed))
        # Its budget has no room beside the one that runs, while a worker has.
        service.submit(agentId="coder-1", projectId="small", estimate={"tokens": 8})
        wait_until(lambda: shown("queued") == 3, seconds=20.0, what=lambda: str(shown("queued")))
        wait_until(lambda: shown("ready") == 0, seconds=20.0, what=lambda: str(shown("ready")))
    assert all("headgate_agent_tasks_queued" not in query for query in scaling_queries())


def test_workers_are_scaled_by_metrics_that_a_service_shows_of_an_agent(tmp_path: Path) -> None:
    settings = tmp_path / "headgate.toml"
    settings.write_text(settings_for_workers())
    with running_service(tmp_path, "--config", str(settings)) as service:
        service.submit(agentId="coder-1")
        shown = service.text("/metrics")
    named = {name for query in scaling_queries() for name in re.findall(r"headgate_\w+", query)}
    assert len(named) == 3
    for name in named:
        assert f'{name}{{agent="coder-1"}} ' in shown


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here")
def test_prometheus_understands_what_workers_are_scaled_by(tmp_path: Path) -> None:
    rules = [
        {"record": f"workers:{number}", "expr": query}
        for number, query in enumerate(scaling_queries())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "workers", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
@pytest.mark.parametrize("variant", ["base", "postgres", "monitoring", "workers"])
def test_kubectl_builds_what_the_schema_of_kubernetes_allows(variant: str, tmp_path: Path) -> None:
    # It reads files and nothing else: no cluster is asked.
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / variant)],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}
    for kind, one in built.items():
        if kind not in ("ServiceMonitor", "ScaledObject"):
            kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)
    expected = {
        "base": {"ConfigMap", "PersistentVolumeClaim", "Service", "Deployment"},
        "postgres": {"ConfigMap", "Service", "Deployment", "PodDisruptionBudget"},
        "monitoring": {"ServiceMonitor"},
        "workers": {"Deployment", "ScaledObject"},
    }
    assert set(built) == expected[variant]
    if variant == "postgres":
        spec = built["Deployment"]["spec"]["template"]["spec"]
        data = next(volume for volume in spec["volumes"] if volume["name"] == "data")
        assert data == {"name": "data", "emptyDir": {}}
        assert built["Deployment"]["spec"]["strategy"]["type"] == "RollingUpdate"


def test_actions_and_workflows_follow_the_schemas_of_github(tmp_path: Path) -> None:
    check_schema("github-actions", ACTION / "action.yml", ACTION / "report/action.yml")
    workflows = workflow_blocks()
    assert len(workflows) == 2
    for number, body in enumerate(workflows):
        path = tmp_path / f"{number}.yml"
        path.write_text(body)
        check_schema("github-workflows", path)


def workflow_blocks() -> list[str]:
    return [one.body for one in blocks_of(CI_PAGE.read_text()) if one.language == "yaml"]


def test_the_workflow_gives_the_action_inputs_that_it_has() -> None:
    steps = yaml.safe_load(workflow_blocks()[0])["jobs"]["review"]["steps"]
    given = next(step["with"] for step in steps if "github-action@" in step.get("uses", ""))
    inputs = loaded(ACTION / "action.yml")["inputs"]
    assert set(given) <= set(inputs)
    assert {name for name, one in inputs.items() if one.get("required")} <= set(given)


def environment(**variables: str) -> dict[str, str]:
    """Return an environment in which the commands of this one are found."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "HOME": os.devnull, "LANG": "C.UTF-8", **variables}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@contextmanager
def job(folder: Path, wheel: Path) -> Iterator[Mapping[str, str]]:
    """Give the variables of a job; the gateway that it leaves behind is ended.

    The wheel is installed without a network: what it needs is taken from this environment.
    """
    files = {name: str(folder / name.lower()) for name in ("GITHUB_ENV", "GITHUB_OUTPUT")}
    variables = environment(
        **files,
        GITHUB_STEP_SUMMARY=str(folder / "summary"),
        RUNNER_TEMP=str(folder),
        PACKAGE=str(wheel),
        PORT="0",
        PIP_NO_INDEX="1",
        PIP_NO_DEPS="1",
        PYTHONPATH=sysconfig.get_path("purelib"),
    )
    try:
        yield variables
    finally:
        pid = folder / "headgate/pid"
        if pid.exists():
            with suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)


def assignments(path: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in Path(path).read_text().splitlines())


def test_the_action_starts_a_gateway_with_a_budget_and_reports_the_cost(
    tmp_path: Path, wheel: Path
) -> None:
    with fake_provider() as provider, job(tmp_path, wheel) as variables:
        settings = tmp_path / "more.toml"
        settings.write_text(
            f'[upstreams.openai]\nkind = "openai"\nbase_url = "{provider}/v1"\n'
            'key_env = "OPENAI_API_KEY"\n'
            '[prices."gpt-5-mini"]\ninput = 1000\noutput = 2000\n'
        )
        given = {"BUDGET_USD": "0.03", "SETTINGS": str(settings), "OPENAI_API_KEY": "sk-secret"}
        started = run_script(ACTION / "start.sh", {**variables, **given})
        exported = assignments(variables["GITHUB_ENV"])
        token = exported["OPENAI_API_KEY"]
        assert f"::add-mask::{token}" in started
        assert "sk-secret" not in started + str(exported)
        assert exported["OPENAI_BASE_URL"] == f"{exported['ANTHROPIC_BASE_URL']}/v1"
        statuses = [ask_model(exported, variables) for _ in range(3)]
        assert statuses == [200, 200, 402]
        reported = run_script(ACTION / "report/report.sh", {**variables, **exported})
        assert "gpt-5-mini" in reported
        assert assignments(variables["GITHUB_OUTPUT"])["cost-usd"].rstrip("0") == "0.02"
        assert "$0.02" in Path(variables["GITHUB_STEP_SUMMARY"]).read_text()


def test_jobs_of_a_pull_request_get_tokens_with_one_budget_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_KEY", "any-text")
    work = yaml.safe_load(workflow_blocks()[1])["jobs"]["review"]
    (step,) = (one for one in work["steps"] if "HEADGATE_TOKEN" in one.get("env", {}))
    (of_page,) = (one.body for one in blocks_of(CI_PAGE.read_text()) if one.language == "toml")
    settings = tmp_path / "headgate.toml"
    with fake_provider() as provider:
        settings.write_text(
            f'{of_page}[upstreams.openai]\nkind = "openai"\nbase_url = "{provider}/v1"\n'
            'key_env = "FAKE_KEY"\n'
            '[prices."gpt-5-mini"]\ninput = 0\noutput = 1_000_000\n'
        )
        with running_service(tmp_path, "--config", str(settings)) as service:
            body = {"model": "gpt-5-mini", "messages": [{"role": "user", "content": "Say hello"}]}
            path = "/v1/chat/completions"
            variables = environment(
                HEADGATE_URL=service.address,
                HEADGATE_TOKEN=(tmp_path / "data/token").read_text().strip(),
                AGENT=step["env"]["AGENT"].replace("${{ github.event.number }}", "7"),
                GITHUB_ENV=str(tmp_path / "env"),
                GITHUB_RUN_ATTEMPT="1",
            )

            def pushed(run_id: str) -> None:
                script = ["bash", "-ec", step["run"]]
                subprocess.run(script, env=variables | {"GITHUB_RUN_ID": run_id}, check=True)
                service.token = assignments(variables["GITHUB_ENV"])["ANTHROPIC_AUTH_TOKEN"]

            def asked(**more: object) -> int:
                return service.ask("POST", path, body | more).status

            pushed("1")
            # The longest answer of the model does not fit, however short its answers usually are.
            assert [asked(max_tokens=1), asked()] == [200, 402]
            pushed("2")
            assert [asked(max_tokens=1), asked(max_tokens=1)] == [200, 402]
            other = {"X-Headgate-Agent": "pr-8"}
            assert service.ask("POST", path, body, headers=other).status == 403


def test_the_action_refuses_a_budget_that_is_no_number(tmp_path: Path, wheel: Path) -> None:
    with job(tmp_path, wheel) as variables:
        given = {**variables, "BUDGET_USD": "plenty"}
        done = subprocess.run(
            [ACTION / "start.sh"], env=given, capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stdout.startswith("::error::budget-usd must be a number of dollars")


def test_the_report_of_a_job_without_a_gateway_says_so(tmp_path: Path) -> None:
    said = run_script(ACTION / "report/report.sh", environment(RUNNER_TEMP=str(tmp_path)))
    assert said == "No gateway was started, so no call has cost anything.\n"


def test_scripts_of_the_action_have_no_faults_and_may_be_run() -> None:
    scripts = list(ACTION.rglob("*.sh"))
    done = subprocess.run(
        [BIN / "shellcheck", *scripts], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert all(path.stat().st_mode & stat.S_IXUSR for path in scripts)


def run_script(path: Path, variables: Mapping[str, str]) -> str:
    done = subprocess.run(
        [path], env=dict(variables), capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ask_model(exported: Mapping[str, str], variables: Mapping[str, str]) -> int:
    """Send a call as the next step of a job does, by what the action has set; give its status."""
    code = (
        "import openai\n"
        "messages = [{'role': 'user', 'content': 'Say hello'}]\n"
        "try:\n"
        "    client = openai.OpenAI(max_retries=0)\n"
        "    client.chat.completions.create(model='gpt-5-mini', messages=messages)\n"
        "    print(200)\n"
        "except openai.APIStatusError as error:\n"
        "    print(error.status_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**variables, **exported},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)
