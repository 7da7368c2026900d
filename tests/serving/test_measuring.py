"""Whether a further configuration may be tried, and which part of a fleet an application holds."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from services.contracts.apps import AppEvaluation, FleetEvaluation
from services.contracts.partition import PartitionProblem, VariantInstances
from services.contracts.serving import InstanceState
from services.core.policies.clover.anneal import AnnealingConfig
from services.core.policies.clover.measured import MeasuredSearch
from services.serving.fleets.assignment import GpuState, Placed
from services.serving.fleets.measuring import Window, held_gpus, measured_of, searches_of, without_room
from services.serving.fleets.observations import bucket_of
from services.serving.repository.apps import Seen
from services.solving.partition import solve_partition

NOW = datetime(2026, 11, 22, tzinfo=UTC)
BIG = [VariantInstances(variant="big", slice="7g", count=2)]


@pytest.fixture(scope="module")
def searches() -> dict[str, MeasuredSearch]:
    variants = [{"name": "big", "accuracy_pct": 84, "profiles": [{"slice": "7g", "service_ms": 60, "busy_w": 138}]}]
    app = {"name": "photos", "variants": variants, "requests_per_s": 10, "sla_p95_ms": 400}
    problem = PartitionProblem.model_validate(
        {"gpus": 2, "idle_w": 80, "intensity_gco2_per_kwh": 200, "applications": [app], "candidates": 3}
    )
    found = solve_partition(problem)
    assert len(found.applications[0].candidates) <= 3
    return searches_of(problem, found, AnnealingConfig())


def evaluated(
    searches: dict[str, MeasuredSearch], p95_ms: float, waiting: int = 0
) -> tuple[FleetEvaluation, dict[str, Window]]:
    seen = Seen(100, 100, 0, 8_400.0, {bucket_of(p95_ms): 100})
    windows = {"photos": Window(seen, 2_500.0, waiting)}
    present = FleetEvaluation(begun_at=NOW, applications=[AppEvaluation(name="photos", instances=BIG, is_tried=True)])
    return measured_of(present, searches, windows, NOW), windows


@pytest.mark.parametrize(
    ("p95_ms", "waiting", "share", "said"),
    [
        (300, 0, 0.9, None),
        (375, 0, 0.9, "The p95 of photos was"),
        (300, 0, 0.7, "more than 70 % of its SLA of 400 ms"),
        (300, 12, 0.9, None),
        (300, 13, 0.9, "The queue of photos held 13 requests, which take 390 ms: more than 90 % of its SLA"),
    ],
)
def test_there_is_room_while_latency_is_below_a_share_of_the_sla_and_the_queue_is_short(
    searches: dict[str, MeasuredSearch], p95_ms: float, waiting: int, share: float, said: str | None
) -> None:
    evaluation, windows = evaluated(searches, p95_ms, waiting)
    found = without_room(evaluation, searches, windows, share)
    assert (said is None) == (found is None), found
    assert said is None or said in (found or "")


def test_what_is_measured_is_per_answer(searches: dict[str, MeasuredSearch]) -> None:
    (found,) = evaluated(searches, 500)[0].applications
    assert found.measured is not None
    assert (found.measured.accuracy_pct, found.measured.energy_j_per_request) == (84, 25)
    assert found.late == found.answered == 100


def test_a_slice_counts_by_its_share_of_the_slices_of_its_gpu() -> None:
    gpus = [GpuState(("n0", at), sizes, sizes, "applied", True) for at, sizes in enumerate([(), (3, 3), (3, 2, 2)])]
    ready = InstanceState.READY
    instances = [
        Placed("i0", ("photos", "big", "7g"), ready, ("n0", 0)),
        Placed("i1", ("photos", "big", "3g"), ready, ("n0", 1)),
        Placed("i2", ("photos", "small", "2g"), ready, ("n0", 2)),
        Placed("i3", ("streets", "small", "2g"), ready, ("n0", 2)),
    ]
    assert held_gpus("photos", gpus, instances) == pytest.approx(1 + 3 / 6 + 2 / 7)
