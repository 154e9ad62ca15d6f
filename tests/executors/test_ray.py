"""Ray targets without a cluster: how they are written, and what fits where."""

from __future__ import annotations

import msgspec
import pytest

from headgate.core.lifecycle import Cancelled, Failed, Limited, Lost, Outcome, Succeeded, Usage
from headgate.errors import InvalidSettingError, MissingPackageError
from headgate.executors.build import build_executor
from headgate.executors.ray import read, room_in, tell
from headgate.executors.targets import RayTarget
from headgate.testing import VirtualClock


def node(**resources: tuple[float, float]) -> dict[str, dict[str, float]]:
    """Return a node with what is free of each resource, and what it has of it."""
    return {
        "free": {name: free for name, (free, _) in resources.items()},
        "total": {name: total for name, (_, total) in resources.items()},
    }


@pytest.mark.parametrize(
    ("nodes", "needs", "others", "free", "why"),
    [
        ([node(CPU=(4, 4))], {"num_cpus": 1}, (), 4, ""),
        ([node(CPU=(4, 4))], {"num_cpus": 1}, [({"num_cpus": 1}, 3)], 1, ""),
        ([node(CPU=(4, 4))], {"num_cpus": 1}, [({"num_cpus": 1}, 9)], 0, "has not placed yet"),
        # What waits to be placed takes room whatever its target, if it fits anywhere.
        ([node(CPU=(4, 4))], {"num_cpus": 1}, [({"num_cpus": 2}, 1), ({"num_cpus": 1}, 1)], 1, ""),
        ([node(CPU=(4, 4), GPU=(1, 1))], {"num_gpus": 1}, [({"num_cpus": 1}, 9)], 1, ""),
        ([node(CPU=(2, 4))], {"num_cpus": 1}, [({"num_cpus": 4}, 2)], 2, ""),
        ([node(CPU=(2, 4))], {"num_cpus": 1}, [({"num_cpus": 0}, 2)], 2, ""),
        # What fits nowhere in one piece does not fit, however much there is in all.
        (
            [node(CPU=(1, 4)), node(CPU=(1, 4))],
            {"num_cpus": 2},
            (),
            0,
            "1 of 8 is free on one node",
        ),
        ([node(CPU=(2, 4)), node(CPU=(3, 4))], {"num_cpus": 2}, (), 2, ""),
        ([node(CPU=(4, 4), GPU=(0.5, 1))], {"num_cpus": 1, "num_gpus": 0.5}, (), 1, ""),
        ([node(CPU=(4, 4), GPU=(0, 1))], {"num_cpus": 1, "num_gpus": 0.5}, (), 0, "num_gpus 0.5"),
        ([node(CPU=(4, 4))], {"num_cpus": 1, "disk": 1}, (), 0, "has disk 1; the largest has 0"),
        ([], {"num_cpus": 1}, (), 0, "no node of the Ray cluster has num_cpus 1"),
        ([], {"num_cpus": 0}, (), 0, "the Ray cluster has no node"),
        ([node(CPU=(0.3, 1))], {"num_cpus": 0.1}, (), 3, ""),
    ],
)
def test_what_fits_into_a_cluster(
    nodes: list[dict[str, dict[str, float]]],
    needs: dict[str, float],
    others: list[tuple[dict[str, float], int]],
    free: int,
    why: str,
) -> None:
    room = room_in(nodes, needs, pending=others)
    assert room.free == free
    assert why in room.why
    assert bool(room.why) == (free == 0)


@pytest.mark.parametrize(
    "outcome",
    [
        Succeeded(result=msgspec.Raw(b'{"a": 1}'), usage=Usage(tokens=3, model="m")),
        Succeeded(),
        Failed(error="no", is_transient=True),
        Limited(retry_after_seconds=3.0, slot="s"),
        Cancelled(),
        Lost(has_started=True, error="gone"),
    ],
)
def test_an_outcome_comes_back_as_it_was(outcome: Outcome) -> None:
    found = read(tell(outcome))
    assert type(found) is type(outcome)
    assert msgspec.json.encode(found) == msgspec.json.encode(outcome)


@pytest.mark.parametrize(
    "target",
    [RayTarget(), RayTarget(entry_point="a:b", command=("ls",))],
    ids=["neither", "both"],
)
def test_a_target_names_a_function_or_a_command(target: RayTarget) -> None:
    with pytest.raises(InvalidSettingError, match="either entry_point or command"):
        build_executor("x", target, environ={}, clock=VirtualClock())


async def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    executor = build_executor("x", RayTarget(entry_point="a:b"), environ={}, clock=VirtualClock())
    with pytest.raises(MissingPackageError, match=r"pip install 'headgate\[ray\]'"):
        await executor.open()
