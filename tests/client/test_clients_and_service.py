"""Both clients against a real service, and against each other."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from client.both_clients import Ask, EitherClient
from headgate import Client
from headgate.errors import RequestRefusedError, ServiceError, WaitTimeoutError
from service.support import ECHO_TARGET, SLOW_TARGET, ServiceProcess, running_service

SETTINGS = f"""{ECHO_TARGET}{SLOW_TARGET}
[targets.brief]
kind = "command"
command = ["sleep", "0.3"]

[[slots]]
name = "work"
provider = "zai"
key_env = "NOT_SET_ANYWHERE"
enabled = false
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder: Path = tmp_path_factory.mktemp("clients")
    (folder / "headgate.toml").write_text(SETTINGS)
    with running_service(folder) as process:
        yield process


@pytest.fixture
def client(ask: Ask, service: ServiceProcess) -> EitherClient:
    return EitherClient(ask, service.address)


def test_a_task_is_submitted_waited_for_and_read(client: EitherClient) -> None:
    submitted = client.submit(agent_id="a", action="draft", params={"about": ["gates", 1]})
    task = client.wait(submitted.task_id, timeout_seconds=20)
    assert task.state.value == "done"
    assert task.result == {"echo": {"action": "draft", "params": {"about": ["gates", 1]}}}
    assert task.params == {"about": ["gates", 1]}


def test_progress_begins_with_what_is_so_and_ends_with_the_end(client: EitherClient) -> None:
    submitted = client.submit(agent_id="a", action="x", target="brief")
    states = [task.state.value for task in client.progress(submitted.task_id, timeout_seconds=20)]
    assert states[-1] == "done"
    assert len(states) == len(set(states))


def test_waiting_has_an_end_and_a_cancel_stops_what_runs(client: EitherClient) -> None:
    submitted = client.submit(agent_id="a", action="x", target="slow")
    with pytest.raises(WaitTimeoutError):
        client.wait(submitted.task_id, timeout_seconds=0.3)
    assert client.cancel(submitted.task_id).status in {"cancelled", "cancelling"}
    assert client.wait(submitted.task_id, timeout_seconds=20).state.value == "cancelled"
    with pytest.raises(RequestRefusedError) as caught:
        client.cancel(submitted.task_id)
    assert (caught.value.code, caught.value.status) == ("conflict", 409)


def test_a_batch_answers_for_each_of_its_tasks(client: EitherClient) -> None:
    answer = client.submit_batch([{"action": "x"}, {}], agent_id="a")
    assert answer.submitted == 1
    assert [entry.code for entry in answer.tasks] == [None, "missing_field"]


@pytest.mark.parametrize("owner", ["agent_id", "project_id"])
def test_the_tasks_of_a_batch_may_name_their_own_owners(client: EitherClient, owner: str) -> None:
    tasks = [{"action": "x", owner: "default"}, {"action": "y", owner: "default"}]
    assert client.submit_batch(tasks).submitted == 2


def test_all_tasks_are_found_page_by_page(client: EitherClient) -> None:
    client.submit_batch([{"action": "x"}] * 5, agent_id="pages")
    page = client.list_tasks(agent_id="pages", limit=2)
    rest = client.list_tasks(agent_id="pages", cursor=page.next_cursor)
    everything = client.iterate_tasks(agent_id="pages")
    assert [task.task_id for task in everything] == [
        task.task_id for task in (*page.tasks, *rest.tasks)
    ]
    assert len(everything) % 5 == 0


def test_a_waiting_task_says_why(client: EitherClient) -> None:
    held = client.submit(agent_id="a", action="x", target="slow")
    waiting = client.submit(agent_id="a", action="x", depends_on=[held.task_id])
    why = client.why(waiting.task_id)
    assert [reason.detail["reason"] for reason in why.reasons] == ["parents_pending"]
    client.cancel(held.task_id)


def test_the_service_tells_of_itself(client: EitherClient) -> None:
    assert client.stats().config.max_queue_size == 1000
    assert client.ready().role == "dispatcher"


def test_slots_are_shown_and_switched(client: EitherClient) -> None:
    assert client.slots().count == 1
    slot = client.slot("work")
    assert (slot.name, slot.state, slot.wake_modes) == ("work", "disabled", [])
    assert client.slots().slots[0].name == "work"
    assert client.disable_slot("work").wait_reason
    assert client.enable_slot("work").disabled_reason == "disabled in the configuration"


def test_the_log_of_a_slot_and_the_settings_are_told(client: EitherClient) -> None:
    log = client.slot_log("work", limit=5)
    assert log.count == len(log.lines) <= 5
    body = client.settings(section="slots", changed=True, limit=2)
    assert [one.key for one in body.settings] == ["slots.work.name", "slots.work.provider"]
    assert body.next_cursor is not None
    rest = client.settings(section="slots", changed=True, cursor=body.next_cursor)
    assert rest.matching == body.matching == len(rest.settings) + 2


@pytest.mark.parametrize(("name", "code"), [("work", "slot_unavailable"), ("none", "not_found")])
def test_a_slot_that_cannot_be_woken_is_refused(client: EitherClient, name: str, code: str) -> None:
    with pytest.raises(RequestRefusedError) as caught:
        client.warm_slot(name)
    assert caught.value.code == code


def test_any_request_can_be_sent(client: EitherClient) -> None:
    assert client.request("GET", "/livez", response_type=dict)["status"] == "ok"


def test_many_may_wait_at_once(service: ServiceProcess) -> None:
    async def wait_for_all() -> set[str]:
        async with Client(service.address) as client:
            tasks = [{"action": "x", "target": "brief"}] * 50
            batches = [await client.submit_batch(tasks, agent_id=f"m{n}") for n in range(3)]  # type: ignore[arg-type]
            ids = [entry.task_id or "" for batch in batches for entry in batch.tasks]
            ended = await asyncio.gather(*(client.wait(one, timeout_seconds=60) for one in ids))
            return {task.state.value for task in ended}

    assert asyncio.run(wait_for_all()) == {"done"}


def test_what_is_configured_is_shown_changed_and_put_back(client: EitherClient) -> None:
    assert client.get_project("default") in client.list_projects().projects
    changed = client.change_project("default", credit_weight=2.5, status="active")
    assert (changed.credit_weight, changed.overridden) == (2.5, ["creditWeight", "status"])
    assert client.change_project("default", reset=["credit_weight", "status"]).overridden == []
    assert client.change_agent("tidy", capacity=3).capacity == 3
    assert client.get_agent("tidy").overridden == ["capacity"]
    assert client.change_agent("tidy", reset=["capacity"]).overridden == []
    assert client.list_agents().agents is not None
    assert client.change_target("brief", status="paused").status == "paused"
    assert client.change_target("brief", reset=["status"]).status == "active"
    assert client.get_target("brief") in client.list_targets().targets
    assert client.audit(limit=1).entries[0].action == "target.patch"


def test_budgets_are_set_held_and_booked(client: EitherClient) -> None:
    scope = f"project:default/session:{uuid.uuid4().hex}"
    budgets = client.change_budget(scope, limit_usd="2.00", limit_tokens=100).budgets
    assert [one.limit_usd for one in budgets if one.scope == scope] == ["2.00"]
    assert client.list_budgets().budgets == budgets
    held = client.reserve("r1", scope, usd=Decimal("1.50"), tokens=10)
    assert (held.is_live, held.usd, held.tokens) == (True, "1.50", 10)
    with pytest.raises(ServiceError) as caught:
        client.reserve("r2", scope, usd=1)
    assert caught.value.code == "budget_exceeded"
    dispatched = client.dispatched("r1", scope)
    assert dispatched.state == "dispatched"
    extended = client.extend("r1", scope, lease_seconds=3_600)
    assert extended.lease_until > dispatched.lease_until
    assert client.commit("r1", scope, usd="0.25", tokens=4).state == "committed"
    client.reserve("r3", scope, tokens=1)
    assert client.release("r3", scope).state == "released"
    status = client.budget_status(scope)
    assert (status.spent_usd, status.spent_tokens, status.reserved_usd) == ("0.25", 4, "0.00")
    assert client.budget_status().scope == ""
    newest = client.budget_journal(scope, limit=1)
    assert (newest.scope, newest.count) == (scope, 1)
    older = client.budget_journal(scope, cursor=newest.next_cursor)
    assert older.entries[0].at <= newest.entries[0].at
    assert client.lanes().strategy == "fair-fifo"


def test_a_budget_is_founded_by_the_first_who_names_its_limits(client: EitherClient) -> None:
    scope = f"session:{uuid.uuid4().hex}"
    for _ in range(2):
        founded = client.create_budget(scope, limit_usd=Decimal("2.00"), window="day")
        assert (founded.scope, founded.limit_usd, founded.window) == (scope, "2.00", "day")
        assert founded.limit_tokens is None
    with pytest.raises(RequestRefusedError) as caught:
        client.create_budget(scope, limit_usd="3.00")
    error = caught.value
    assert (error.code, error.details["existing"]) == ("budget_mismatch", "$2.00 (day)")
    assert client.budget_status(scope).limit_usd == "2.00"


def test_the_time_of_an_attempt_is_sent_and_shown(client: EitherClient) -> None:
    task_id = client.submit(agent_id="a", action="x", timeout_seconds=90.5).task_id
    assert client.get(task_id).timeout_seconds == 90.5


def test_tokens_are_made_shown_and_revoked(client: EitherClient) -> None:
    made = client.create_token("ci", ["read"], project_id="default")
    assert made.token.startswith("hg_")
    assert made.id in [one.id for one in client.list_tokens().tokens]
    assert client.revoke_token(made.id).state == "revoked"


def test_secrets_are_shown_to_whoever_has_a_token(
    ask: Ask, service: ServiceProcess, client: EitherClient
) -> None:
    with pytest.raises(RequestRefusedError, match="headgate token create") as caught:
        client.webhook_secrets()
    assert caught.value.status == 401
    # Both kinds of client ask one service, where a name is taken once.
    token = client.create_token(f"secrets {uuid.uuid4()}", ["admin"]).token
    with_token = EitherClient(ask, service.address, token=token)
    before = with_token.webhook_secrets().secrets
    assert client.rotate_webhook_secret().secrets[0] not in before


def test_webhooks_are_listed_pinged_and_sent_again(client: EitherClient) -> None:
    assert client.list_webhooks(state="dead", limit=5).count == 0
    with pytest.raises(RequestRefusedError, match="may not be reached"):
        client.ping_webhook("http://127.0.0.1:9/")
    for verb in (client.get_webhook, client.redeliver):
        with pytest.raises(RequestRefusedError) as caught:
            verb("msg_01m7fs2skb2415wvpawg4jr96h")
        assert caught.value.status == 404
