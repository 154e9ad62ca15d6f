"""The share of each project: the one that its weight asks for, and the one that it had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from headgate.core.projects import Project
from headgate.core.share_ratios import BudgetManager


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One project's parts of 1; a positive `deficit` is owed work."""

    project_id: str
    weight: float
    target: float
    actual: float
    tokens: int

    @property
    def deficit(self) -> float:
        """How far the project is below its share; negative is above it."""
        return self.target - self.actual


def shares(projects: Iterable[Project], tokens: Mapping[str, int]) -> tuple[Share, ...]:
    """Return the shares of projects in their order; where nobody has a weight, all are equal.

    Tokens of a project that is not among them count in the whole. Without any, nobody has had
    anything yet.
    """
    weights = {project.id: project.credit_weight for project in projects}
    whole = sum(tokens.values())
    targets = BudgetManager().calculate_target_ratios(weights)
    return tuple(
        Share(
            project_id=name,
            weight=weight,
            target=targets[name] if targets else 1 / len(weights),
            actual=tokens.get(name, 0) / whole if whole else 0.0,
            tokens=tokens.get(name, 0),
        )
        for name, weight in weights.items()
    )
