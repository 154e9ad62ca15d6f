"""The order of steps: parents go first, and a circle is named in its order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.workflow.expansion import circle_in, ordered, topological_order
from workflow.views import read

graphs = (
    st.integers(1, 8)
    .flatmap(
        lambda size: st.lists(
            st.lists(
                st.integers(0, size - 1).map(lambda number: f"s{number}"), max_size=4, unique=True
            ),
            min_size=size,
            max_size=size,
        )
    )
    .map(lambda parents: {f"s{number}": tuple(before) for number, before in enumerate(parents)})
)


@given(graphs)
def test_either_there_is_an_order_or_a_circle(parents: dict[str, tuple[str, ...]]) -> None:
    order, circle = topological_order(parents), circle_in(parents)
    assert (len(order) == len(parents)) == (not circle)
    for position, name in enumerate(order):
        assert set(parents[name]) <= set(order[:position])
    for name, waited_for in zip(circle, (*circle[1:], *circle[:1]), strict=True):
        assert waited_for in parents[name]


def test_steps_are_ordered_with_parents_first_and_else_as_in_the_file() -> None:
    workflow = read("""
steps:
  - {id: last, command: ["{steps.b.output}", "{steps.a.output}"]}
  - {id: b, command: [x]}
  - {id: a, depends_on: b, command: [x]}
""")
    assert [step.id for step in ordered(workflow.steps)] == ["b", "a", "last"]
    assert workflow.step("last").depends_on == ("b", "a")


def test_a_long_chain_is_no_circle() -> None:
    chain = {f"s{number}": (f"s{number - 1}",) if number else () for number in range(10_000)}
    assert circle_in(chain) == ()
    assert topological_order(chain) == list(chain)
