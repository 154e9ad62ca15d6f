"""Every sentence that tenants can rely on is proved by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT.parent / "docs" / "how-to" / "secure.md"
HARMLESS = ("tenants/test_harms.py::test_no_field_of_a_route_harms_another",)

PROOFS: dict[str, tuple[str, ...]] = {
    "A used-up budget stops a tenant's task even if": (
        "engine/test_claims.py::test_no_claim_passes_a_dollar_budget",
        "engine/test_claims.py::test_no_claim_passes_a_token_budget",
    ),
    "If a tenant reports a cost above its reservation": (
        "budgets/test_claims_stateful.py::test_tenants_on_the_ledger_in_memory",
        "budgets/test_claims_stateful.py::test_tenants_on_the_sqlite_ledger",
        "budgets/test_claims_stateful.py::test_tenants_on_the_redis_ledger",
        "budgets/test_claims_stateful.py::test_tenants_on_the_postgresql_ledger",
        *HARMLESS,
    ),
    "If a tenant with an unrestricted token reports": (
        ("tenants/test_harms.py::test_a_token_that_is_bound_to_nothing_carries_no_budget_to_minus"),
    ),
    "If webhook receivers of one project hang": (
        (
            "engine/test_webhooks.py"
            "::test_receivers_of_one_project_that_hang_delay_those_of_no_other"
        ),
    ),
    "The tokens of a project together can charge": (
        (
            "api/test_budgets_api.py"
            "::test_a_tenant_charges_a_bounded_number_of_scopes_and_others_are_not_counted"
        ),
    ),
    "Tasks, calls and reservations with a token": (
        "api/test_auth.py::test_what_an_agents_token_sends_is_charged_to_its_own_budget",
        "api/test_auth.py::test_a_retry_charges_the_agent_of_whoever_sends_it",
        "api/test_budgets_api.py::test_what_an_agents_token_holds_is_charged_to_its_own_budget",
        "gateway/test_gateway_money.py::test_calls_of_an_agents_token_use_up_its_own_budget",
    ),
    "Failing calls of one tenant neither": (
        "gateway/test_gateway_isolation.py::test_one_tenant_closes_no_upstream_with_two_senders",
        "gateway/test_gateway_isolation.py::test_what_is_passed_on_opens_no_circuit",
        (
            "gateway/test_gateway_isolation.py"
            "::test_a_tenant_whose_calls_fail_leaves_the_others_their_retries"
        ),
        "gateway/test_hostile.py::test_a_tenant_whose_requests_fail_does_not_close_the_upstream",
    ),
    "No token can take the position": (
        "gateway/test_gateway_waiting.py::test_the_place_of_another_token_cannot_be_taken",
        "gateway/test_gateway_places.py::test_one_tenant_takes_no_place_from_another",
    ),
    "Only the project that made a stored response": (
        (
            "gateway/test_gateway_isolation.py"
            "::test_a_tenant_reads_and_deletes_its_own_stored_responses_alone"
        ),
        (
            "gateway/test_gateway_isolation.py"
            "::test_a_token_of_an_agent_has_no_stored_responses_of_other_agents"
        ),
        (
            "gateway/test_gateway_isolation.py"
            "::test_a_busy_tenant_has_no_other_lose_its_stored_responses"
        ),
    ),
    "A retry may charge only the budgets": (
        "api/test_auth.py::test_a_retry_charges_what_its_caller_may_charge",
        "api/test_submission.py::test_a_retry_is_trusted_where_both_of_its_senders_are",
    ),
    "A restricted token can read the amounts of": (
        (
            "api/test_budgets_api.py"
            "::test_a_bound_token_is_told_no_figures_of_budgets_that_are_not_its_own"
        ),
    ),
    "If a clock jumps ahead and back": (
        (
            "budgets/test_conformance_windows.py"
            "::test_a_clock_that_jumps_ahead_and_back_forgets_no_spending"
        ),
    ),
    "A project cannot take the share of an equal": (
        "core/test_shares.py::test_no_claim_takes_the_share_of_an_equal_project",
    ),
    "However much one token writes": (
        (
            "storage/test_job_queue.py"
            "::test_the_write_of_another_is_in_the_next_transaction_beside_a_flood"
        ),
        "storage/test_job_queue.py::test_beside_others_a_caller_is_in_one_transaction_of_three",
        "storage/test_job_queue.py::test_large_writes_of_a_caller_are_few_in_a_transaction",
    ),
    "However many connections, streams or bytes": (
        "api/test_shares.py::test_however_many_take_all_they_can_the_next_finds_room",
    ),
    "However many requests one tenant sends to": (
        (
            "service/test_signs_of_life.py"
            "::test_a_busy_node_loses_neither_its_tasks_nor_the_dispatcher"
        ),
    ),
    "Large requests and large answers of targets": (
        "api/test_slices.py::test_no_route_holds_the_loop_for_all_of_its_rows",
        "api/test_submission.py::test_a_megabyte_of_any_json_is_judged_in_short_steps",
        "providers/test_http_client.py::test_no_answer_holds_the_loop",
    ),
    "Idle connections never use up the file descriptors": (
        "service/test_descriptors.py::test_idle_connections_leave_descriptors_for_tasks",
        (
            "service/test_descriptors.py"
            "::test_without_a_descriptor_tasks_wait_and_begin_when_there_is_one"
        ),
    ),
    "Scheduled, refused and ended tasks of one": (
        "storage/test_room.py::test_tasks_that_become_due_keep_nobody_from_submitting",
        "storage/test_room.py::test_a_large_store_takes_from_the_project_that_takes_most",
    ),
    "If the disk is full, the service refuses": (
        "storage/test_room.py::test_a_flood_is_refused_before_the_disk_is_full_and_deletes_its_own",
        "storage/test_room.py::test_a_full_disk_heals_by_itself",
        (
            "storage/test_room.py"
            "::test_a_restart_on_a_full_disk_reads_and_deletes_and_has_lost_nothing"
        ),
    ),
    "A tenant gets": (
        "tenants/test_harms.py::test_what_belongs_to_others_is_answered_like_what_does_not_exist",
    ),
    "No worker and no target can stop the use of a slot": (
        "api/test_closures.py::test_a_worker_that_says_a_day_pauses_its_own_agent_and_no_slot",
        "api/test_closures.py::test_a_target_closes_itself_whatever_slot_a_task_names",
    ),
    "Only the projects that a slot's `projects` lists": (
        "api/test_closures.py::test_a_slot_of_other_projects_is_not_there",
    ),
    "No webhook reaches a cloud's metadata address": (
        "webhooks/test_guard.py::test_no_entry_of_the_allow_list_opens_the_metadata_of_a_cloud",
    ),
    "On loopback without tokens, no page": (
        "api/test_auth.py::test_without_tokens_no_page_of_another_site_reads_or_starts_anything",
        "api/test_webhooks_api.py::test_secrets_are_shown_to_nobody_without_a_token",
    ),
    "A command with `run_as` cannot read": (
        (
            "executors/test_confinement.py"
            "::test_another_user_reads_neither_token_nor_environment_of_the_service"
        ),
    ),
}
"""How each sentence begins, and the tests that prove it."""


def promises() -> list[str]:
    text = PAGE.read_text()
    section = text.split("## What tenants can rely on\n")[1].split(
        "You must do the following yourself"
    )[0]
    return re.findall(r"^- (.+)$", section, re.MULTILINE)


def test_every_promise_has_its_tests() -> None:
    found = promises()
    unproved = [line for line in found if not any(line.startswith(begin) for begin in PROOFS)]
    gone = [begin for begin in PROOFS if not any(line.startswith(begin) for line in found)]
    assert (unproved, gone) == ([], [])


@pytest.mark.parametrize("test", sorted({each for tests in PROOFS.values() for each in tests}))
def test_a_test_that_proves_a_promise_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"^\s*(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
