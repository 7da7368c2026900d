"""What the product's tests ask of its own policies holds for the lab's too."""

from __future__ import annotations

from lab.policies.entries import ENTRIES
from services.core.policies.registry import FAIR
from tests.lab.again import again
from tests.properties import test_policies, test_services, test_stories
from tests.simulator import test_engine, test_gates, test_slices, test_tenants, test_waiting
from tests.unit.core import test_batches, test_bound, test_queue_order, test_ranking, test_zones
from tests.unit.core import test_slices as test_slices_in_plans

HOUR_S = 3_600.0
PLAIN = [(name, dict[str, object]()) for name in ENTRIES]
VARIANTS: list[tuple[str, dict[str, object]]] = [
    *PLAIN,
    (f"{FAIR}pollux", {}),
    ("afs", {"sizes": "any", "resize_gain": 0.0}),
]
IN_ZONES = [("gaia", {}), ("ecovisor", {}), ("wait-awhile", {"unknown_s": 2 * HOUR_S, "window_s": 12 * HOUR_S})]

test_every_policy_keeps_every_promise = again(test_policies.test_every_policy_keeps_every_promise, VARIANTS)
test_every_job_of_a_random_day_ends_and_no_round_is_refused = again(
    test_stories.test_every_job_of_a_random_day_ends_and_no_round_is_refused, ENTRIES
)
test_a_merged_plan_holds_and_leaves_services_to_themselves = again(
    test_services.test_a_merged_plan_holds_and_leaves_services_to_themselves, PLAIN
)
test_no_start_takes_what_a_waiting_service_reserved = again(
    test_services.test_no_start_takes_what_a_waiting_service_reserved, PLAIN
)
test_a_service_starts_once_those_that_give_way_are_gone = again(
    test_services.test_a_service_starts_once_those_that_give_way_are_gone, PLAIN
)

test_jobs_and_idle_devices_add_up_to_the_cluster = again(
    test_engine.test_jobs_and_idle_devices_add_up_to_the_cluster, ENTRIES
)
test_every_policy_keeps_limits_and_order_and_sees_what_it_would_live = again(
    test_gates.test_every_policy_keeps_limits_and_order_and_sees_what_it_would_live, ENTRIES
)
test_every_policy_leaves_slices_alone = again(test_slices.test_every_policy_leaves_slices_alone, ENTRIES)
test_jobs_that_are_not_shown_could_not_have_started = again(
    test_slices.test_jobs_that_are_not_shown_could_not_have_started, ["srtf"]
)
test_tenants_that_always_wait_get_gpu_time_by_their_weights = again(
    test_tenants.test_tenants_that_always_wait_get_gpu_time_by_their_weights, ["pollux", "afs", "srtf", "zeus+las"]
)
test_with_one_tenant_it_is_the_policy_itself = again(test_tenants.test_with_one_tenant_it_is_the_policy_itself, ENTRIES)
test_a_round_without_reasons_decides_the_same = again(
    test_waiting.test_a_round_without_reasons_decides_the_same, [*PLAIN, ("sjf", {"backfill": False})]
)

test_a_policy_that_tunes_chooses_for_those_who_permit_it = again(
    test_batches.test_a_policy_that_tunes_chooses_for_those_who_permit_it,
    [name for name, entry in ENTRIES.items() if entry.tunes_batch],
)
test_a_job_goes_back_to_its_node_though_another_one_suits_better = again(
    test_bound.test_a_job_goes_back_to_its_node_though_another_one_suits_better, ["pollux", "gandiva"]
)
test_a_passive_round_starts_a_bound_job_that_nobody_waits_with = again(
    test_bound.test_a_passive_round_starts_a_bound_job_that_nobody_waits_with, ["pollux", "gandiva"]
)
test_the_jobs_start_one_by_one_in_the_order_that_a_full_cluster_tells = again(
    test_queue_order.test_the_jobs_start_one_by_one_in_the_order_that_a_full_cluster_tells,
    [name for name, entry in ENTRIES.items() if entry.orders],
)
test_sifting_before_sorting_changes_no_start = again(
    test_ranking.test_sifting_before_sorting_changes_no_start, [("sjf", {}), ("srtf", {})]
)
test_no_policy_is_disturbed_by_jobs_on_slices = again(
    test_slices_in_plans.test_no_policy_is_disturbed_by_jobs_on_slices, ENTRIES
)
test_jobs_in_two_zones_end_and_none_is_stopped_and_started_all_the_time = again(
    test_zones.test_jobs_in_two_zones_end_and_none_is_stopped_and_started_all_the_time, IN_ZONES
)
