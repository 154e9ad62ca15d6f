"""A real Ray cluster of two nodes on the loopback address, and services that use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.support import ROOT, ServiceProcess

os.environ.setdefault("RAY_DISABLE_DOCKER_CPU_WARNING", "1")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

TARGETS = """
[scheduler]
retry_base_seconds = 0.1

[targets.function]
kind = "ray"
address = "{address}"
entry_point = "on_ray.work:run"
resources = {{ num_cpus = 1 }}
env = {{ RAY_TEST_VARIABLE = "seen" }}
max_result_bytes = 10000
default = true

[targets.twin]
kind = "ray"
address = "{address}"
entry_point = "on_ray.work:run"

[targets.patient]
kind = "ray"
address = "{address}"
entry_point = "on_ray.work:run_async"
kill_grace_seconds = 5

[targets.program]
kind = "ray"
address = "{address}"
command = ["cat"]

[targets.reporter]
kind = "ray"
address = "{address}"
command = ["sh", "{script}"]

[targets.printer]
kind = "ray"
address = "{address}"
command = ["sh", "-c", "yes | head -c 600000"]

[targets.brief]
kind = "ray"
address = "{address}"
command = ["sh", "-c", "yes | head -c 600000"]
max_result_bytes = 10000

[targets.second]
kind = "ray"
address = "{address}"
entry_point = "on_ray.work:run"
resources = {{ num_cpus = 1, second = 1 }}

[targets.huge]
kind = "ray"
address = "{address}"
entry_point = "on_ray.work:run"
resources = {{ num_gpus = 8 }}
"""

REPORTER = """\
echo "0.4 12 of 30 files" > "$HEADGATE_PROGRESS"
until [ -e {release} ]; do sleep 0.05; done
"""


class RayCluster:
    """Two nodes: one with two processors, and one with the resource `second`, which may go."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster  # noqa: PLC0415

        arguments = {"num_cpus": 2, "node_ip_address": "127.0.0.2", "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=arguments)
        self._second: Any = None
        self.address = str(self._cluster.address)
        self.add_second()

    def add_second(self) -> None:
        """Add the second node, unless it is there."""
        if self._second is None:
            self._second = self._cluster.add_node(
                num_cpus=1, resources={"second": 1}, node_ip_address="127.0.0.2"
            )

    def kill_second(self) -> None:
        """End the second node at once, with all that runs there."""
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = None

    def close(self) -> None:
        """End both nodes."""
        self._cluster.shutdown()


@contextmanager
def connected(cluster: RayCluster) -> Iterator[Any]:
    """Connect the test itself to the cluster, as somebody's program."""
    import ray  # noqa: PLC0415

    cluster.add_second()
    ray.init(address=cluster.address, namespace="program", log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """Start the cluster once; its processes find the work of the tests."""
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # Ray takes 127.0.0.1 for the address of the network; its neighbour stays what it is.
    made = RayCluster()
    yield made
    made.close()


@pytest.fixture
def service(cluster: RayCluster, tmp_path: Path) -> Iterator[ServiceProcess]:
    """Start a service with targets on the cluster; a test may kill it and start it again."""
    cluster.add_second()
    script = tmp_path / "reporter.sh"
    script.write_text(REPORTER.format(release=tmp_path / "release"))
    text = TARGETS.format(address=cluster.address, script=script)
    (tmp_path / "headgate.toml").write_text(text)
    process = ServiceProcess(tmp_path, "--data", str(tmp_path / "data"))
    process.start()
    yield process
    # What runs in the cluster outlives the service.
    (tmp_path / "release").touch()
    process.kill()
