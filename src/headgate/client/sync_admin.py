"""The verbs of `SyncClient` that administer a service."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Literal, TypeVar, Unpack

from headgate.bodies.admin import (
    AgentBody,
    AgentListBody,
    AuditListBody,
    BudgetListBody,
    ProjectBody,
    ProjectListBody,
    SettingsBody,
    TargetBody,
    TargetListBody,
)
from headgate.bodies.figures import JournalBody, LaneListBody
from headgate.bodies.slots import SlotBody, SlotListBody, SlotLogBody
from headgate.bodies.tasks import (
    BudgetStatusBody,
    CreatedTokenBody,
    LimitBody,
    NewTokenBody,
    ReservationBody,
    SettledBody,
    TokenBody,
    TokenListBody,
)
from headgate.bodies.webhooks import DeliveryBody, DeliveryListBody, PingedBody, SecretListBody
from headgate.client import admin_calls
from headgate.client.admin_fields import (
    AgentChange,
    Amount,
    BudgetChange,
    ProjectChange,
    TargetChange,
)
from headgate.client.calls import Call
from headgate.tokens import Permission

Answered = TypeVar("Answered")


class SyncAdminVerbs:
    """A part of `SyncClient`."""

    def list_projects(self) -> ProjectListBody:
        """Return all projects."""
        return self._send(admin_calls.list_projects())

    def get_project(self, project_id: str) -> ProjectBody:
        """Return a project as it is in force."""
        return self._send(admin_calls.get_project(project_id))

    def change_project(
        self, project_id: str, *, reset: Iterable[str] = (), **change: Unpack[ProjectChange]
    ) -> ProjectBody:
        """Change a project; fields in `reset` are as the file says again."""
        return self._send(admin_calls.change_project(project_id, reset, change))

    def list_agents(self) -> AgentListBody:
        """Return the agents that are configured, or that have tasks now."""
        return self._send(admin_calls.list_agents())

    def get_agent(self, agent_id: str) -> AgentBody:
        """Return an agent as it is in force."""
        return self._send(admin_calls.get_agent(agent_id))

    def change_agent(
        self, agent_id: str, *, reset: Iterable[str] = (), **change: Unpack[AgentChange]
    ) -> AgentBody:
        """Change an agent; fields in `reset` are as the file says again."""
        return self._send(admin_calls.change_agent(agent_id, reset, change))

    def list_targets(self) -> TargetListBody:
        """Return all targets."""
        return self._send(admin_calls.list_targets())

    def get_target(self, target: str) -> TargetBody:
        """Return a target as it is in force."""
        return self._send(admin_calls.get_target(target))

    def change_target(
        self, target: str, *, reset: Iterable[str] = (), **change: Unpack[TargetChange]
    ) -> TargetBody:
        """Pause, resume or drain a target; fields in `reset` are as the file says again."""
        return self._send(admin_calls.change_target(target, reset, change))

    def list_budgets(self) -> BudgetListBody:
        """Return the limits of budgets."""
        return self._send(admin_calls.list_budgets())

    def change_budget(
        self, scope: str, *, reset: Iterable[str] = (), **change: Unpack[BudgetChange]
    ) -> BudgetListBody:
        """Change the limits of a scope; the empty one is the root."""
        return self._send(admin_calls.change_budget(scope, reset, change))

    def found_budget(
        self,
        scope: str,
        *,
        limit_usd: Amount | None = None,
        limit_tokens: int | None = None,
        window: str = "none",
    ) -> LimitBody:
        """Set the limits of a scope that has none; other limits there: `budget_mismatch`."""
        body = {"limit_usd": limit_usd, "limit_tokens": limit_tokens, "window": window}
        return self._send(admin_calls.found_budget(scope, body))

    def budget_status(self, scope: str | None = None) -> BudgetStatusBody:
        """Return what a scope and everything within it has used and holds."""
        return self._send(admin_calls.budget_status(scope))

    def budget_journal(
        self, scope: str | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> JournalBody:
        """Return one page of the changes of a scope, newest first."""
        return self._send(admin_calls.budget_journal(scope, limit=limit, cursor=cursor))

    def lanes(self, project_id: str | None = None, *, find: str | None = None) -> LaneListBody:
        """Return where tasks wait, for how long, and how loaded each lane is."""
        return self._send(admin_calls.lanes(project_id, find=find))

    def reserve(
        self,
        reservation_id: str,
        scope: str,
        *,
        usd: Amount = 0,
        tokens: int = 0,
        also: Sequence[str] = (),
        lease_seconds: float = 60.0,
        dispatched: bool = False,
    ) -> ReservationBody:
        """Hold an amount before the work; call the provider only while the answer `is_live`."""
        return self._send(
            admin_calls.reserve(
                {
                    "id": reservation_id,
                    "scope": scope,
                    "usd": usd,
                    "tokens": tokens,
                    "also": also,
                    "lease_seconds": lease_seconds,
                    "dispatched": dispatched,
                }
            )
        )

    def dispatched(self, reservation_id: str, scope: str) -> ReservationBody:
        """Note that the provider is about to be called."""
        return self._send(admin_calls.dispatched(reservation_id, scope))

    def commit(
        self, reservation_id: str, scope: str, *, usd: Amount = 0, tokens: int = 0
    ) -> SettledBody:
        """Book what the work has cost."""
        return self._send(admin_calls.commit(reservation_id, scope, usd=usd, tokens=tokens))

    def release(self, reservation_id: str, scope: str) -> SettledBody:
        """Give back what was held."""
        return self._send(admin_calls.release(reservation_id, scope))

    def list_tokens(self) -> TokenListBody:
        """Return all tokens, without their secrets."""
        return self._send(admin_calls.list_tokens())

    def create_token(
        self,
        name: str,
        permissions: Sequence[Permission],
        *,
        expires_at: datetime | None = None,
        agent_id: str | None = None,
        project_id: str | None = None,
        least_priority: int | None = None,
    ) -> CreatedTokenBody:
        """Make a token; its secret is in this answer and nowhere else."""
        wish = NewTokenBody(
            name=name,
            permissions=list(permissions),
            expires_at=expires_at,
            agent_id=agent_id,
            project_id=project_id,
            least_priority=least_priority,
        )
        return self._send(admin_calls.create_token(wish))

    def revoke_token(self, token_id: str) -> TokenBody:
        """End a token for good."""
        return self._send(admin_calls.revoke_token(token_id))

    def list_webhooks(
        self,
        *,
        state: Literal["pending", "delivered", "dead"] | None = None,
        task: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> DeliveryListBody:
        """Return one page of webhooks, newest first."""
        return self._send(
            admin_calls.list_webhooks(state=state, task=task, limit=limit, cursor=cursor)
        )

    def get_webhook(self, webhook_id: str) -> DeliveryBody:
        """Return what is known of a webhook."""
        return self._send(admin_calls.get_webhook(webhook_id))

    def redeliver(self, webhook_id: str) -> DeliveryBody:
        """Send a webhook again, from its first try on."""
        return self._send(admin_calls.redeliver(webhook_id))

    def ping_webhook(self, url: str, *, timeout_seconds: float = 90.0) -> PingedBody:
        """Send a signed message to an address now, and return what it answered."""
        return self._send(admin_calls.ping_webhook(url, timeout_seconds=timeout_seconds))

    def webhook_secrets(self) -> SecretListBody:
        """Return the secrets that webhooks are signed with."""
        return self._send(admin_calls.webhook_secrets())

    def rotate_webhook_secret(self) -> SecretListBody:
        """Make a new secret; the one before signs as well for a while."""
        return self._send(admin_calls.rotate_webhook_secret())

    def slots(self) -> SlotListBody:
        """Return all slots: how much of each quota is used, when it resets, who waits."""
        return self._send(admin_calls.slots())

    def slot(self, name: str) -> SlotBody:
        """Return a slot."""
        return self._send(admin_calls.slot(name))

    def slot_log(self, name: str, *, limit: int | None = None) -> SlotLogBody:
        """Return what a node has logged of a slot lately, oldest first."""
        return self._send(admin_calls.slot_log(name, limit=limit))

    def warm_slot(self, name: str, *, timeout_seconds: float = 60.0) -> SlotBody:
        """Open a slot's window now; refused while it is open already."""
        return self._send(admin_calls.warm_slot(name, timeout_seconds=timeout_seconds))

    def enable_slot(self, name: str) -> SlotBody:
        """Poll and wake a slot again, whatever has disabled it."""
        return self._send(admin_calls.enable_slot(name))

    def disable_slot(self, name: str) -> SlotBody:
        """Neither poll nor wake a slot until it is enabled; its tasks wait."""
        return self._send(admin_calls.disable_slot(name))

    def settings(
        self,
        *,
        section: str | None = None,
        text: str | None = None,
        changed: bool = False,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> SettingsBody:
        """Return one page of the settings in force, and what the last reload changed."""
        return self._send(
            admin_calls.settings(
                section=section,
                text=text,
                changed="true" if changed else None,
                limit=limit,
                cursor=cursor,
            )
        )

    def audit(self, *, limit: int | None = None, cursor: str | None = None) -> AuditListBody:
        """Return one page of who changed what, newest first."""
        return self._send(admin_calls.audit(limit=limit, cursor=cursor))

    @abstractmethod
    def _send(self, call: Call[Answered]) -> Answered: ...
