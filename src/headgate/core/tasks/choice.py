"""Why an attempt was started when it was: how its project and its lane stood at that moment.

The figures are those that the round compared, so that they say later what nobody could work out
any more. Rule: nothing is decided by them.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class LaneRule(Enum):
    """Why a lane went before the others of its project."""

    FEWEST_IN_FLIGHT = "fewest_inflight"
    HIGHEST_LOAD = "highest_load"
    LONGEST_WAIT = "longest_wait"
    AGENT_IN_TURN = "agent_in_turn"


_LANE_WORDS = {
    LaneRule.FEWEST_IN_FLIGHT: "the agent with the fewest tasks in flight came first",
    LaneRule.HIGHEST_LOAD: "the one with the highest load came first",
    LaneRule.LONGEST_WAIT: "it had waited as long as a lane may",
    LaneRule.AGENT_IN_TURN: "it was its agent's turn",
}


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The grounds of one start.

    `projects` had work that could start, and `lanes` of the project had tasks, `ready` of them in
    the lane that was chosen. The shares are those of the round: what was held counted as used.
    `is_guaranteed` is a project that had started nothing in the window, and so went before shares.
    Of a project without rivals neither is set.
    """

    projects: int = 1
    target_share: float | None = None
    actual_share: float | None = None
    is_guaranteed: bool = False
    lanes: int = 1
    rule: LaneRule = LaneRule.FEWEST_IN_FLIGHT
    ready: int = 1

    def sentences(self, project_id: str) -> list[str]:
        """Return the grounds for people, the widest first."""
        said = [self._project(project_id), self._lane(), self._place()]
        return [one for one in said if one] or ["Nothing else could start then."]

    def _project(self, project_id: str) -> str:
        if self.target_share is None or self.actual_share is None:
            return ""
        if self.is_guaranteed:
            return (
                f"Project {project_id} had started nothing in the window yet, "
                f"so of {self.projects} projects with work it went first."
            )
        return (
            f"Of {self.projects} projects with work, {project_id} stood lowest against its share "
            f"of those that could start something: it had {_percent(self.actual_share)} of their "
            f"tokens, and its target among them is {_percent(self.target_share)}."
        )

    def _lane(self) -> str:
        if self.lanes == 1:
            return ""
        return f"Of the {self.lanes} lanes of the project, {_LANE_WORDS[self.rule]}."

    def _place(self) -> str:
        if self.ready == 1:
            return ""
        return f"In its lane it was the first of {self.ready} tasks that could start."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
