"""The arithmetic of fair shares: target ratios, deficits, and when a budget is used up.

A deficit here is target minus actual, so a positive one is owed work. The scheduler's own sort key
is actual minus target; both put the same project first.
"""

from __future__ import annotations

from collections.abc import Mapping


class BudgetManager:
    """Share arithmetic under an optional cap on all tokens; None means no cap."""

    def __init__(self, global_budget: int | None = None) -> None:
        self.global_budget = global_budget

    def calculate_target_ratios(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return each project's fraction of the whole, or nothing if the weights sum to zero."""
        total_weight = sum(weights.values())
        if total_weight == 0:
            return {}
        return {project_id: weight / total_weight for project_id, weight in weights.items()}

    def calculate_deficits(
        self, weights: Mapping[str, float], usage: Mapping[str, int]
    ) -> dict[str, float]:
        """Return how far each weighted project is below its share; negative is above it.

        Usage of a project without a weight counts in the total and has no deficit of its own.
        """
        targets = self.calculate_target_ratios(weights)
        total_usage = sum(usage.values())
        if total_usage == 0:
            return targets
        return {
            project_id: target - usage.get(project_id, 0) / total_usage
            for project_id, target in targets.items()
        }

    def is_global_budget_exhausted(self, total_used: int) -> bool:
        """Tell whether the cap on all tokens is reached."""
        return self.global_budget is not None and total_used >= self.global_budget

    def is_project_budget_exhausted(self, project_used: int, budget_limit: int | None) -> bool:
        """Tell whether a project has reached its own limit; None is no limit."""
        return budget_limit is not None and project_used >= budget_limit
