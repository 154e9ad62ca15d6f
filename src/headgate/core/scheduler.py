"""The one decision function of Headgate, and its reasons.

`Scheduler.schedule` is deterministic and touches nothing: the same snapshot gives the same plan,
and its argument is left as it was.
"""

from __future__ import annotations

from headgate.core.decision import decide, eligible_turns
from headgate.core.explain import Explanation
from headgate.core.holds import Hold
from headgate.core.lanes.index import LaneIndex
from headgate.core.snapshot import AssignAction, SchedulerState, check_snapshot
from headgate.core.tasks.task import TaskStatus


class Scheduler:
    """Fair share between projects, a policy between lanes, priority between tasks."""

    @staticmethod
    def schedule(state: SchedulerState) -> list[AssignAction]:
        """Return which idle agent is to run which READY task."""
        check_snapshot(state)
        return decide(LaneIndex.of(state), state)

    @staticmethod
    def explain(state: SchedulerState) -> dict[str, Hold]:
        """Return, for every READY task that got no agent, the first rule that held it."""
        return {task_id: holds[0] for task_id, holds in Scheduler.explain_all(state).items()}

    @staticmethod
    def explain_all(state: SchedulerState) -> dict[str, tuple[Hold, ...]]:
        """Return, for every READY task that got no agent, all rules that hold it, widest first."""
        check_snapshot(state)
        explanation = Explanation(state)
        ready = sorted(
            (task for task in state.tasks if task.status is TaskStatus.READY),
            key=lambda task: task.id,
        )
        return {task.id: explanation.holds(task) for task in ready if explanation.is_waiting(task)}

    @staticmethod
    def forgive(state: SchedulerState) -> dict[str, int]:
        """Return the tokens of lag that `max_lag_tokens` newly forgives each project.

        Add them to `project_forgiven` of the next snapshot, and let them leave the window as
        usage of this moment would.
        """
        check_snapshot(state)
        forgiven = {
            turn.project.id: turn.forgiven - state.project_forgiven.get(turn.project.id, 0)
            for turn in eligible_turns(LaneIndex.of(state), state)
        }
        return {project_id: tokens for project_id, tokens in forgiven.items() if tokens}
