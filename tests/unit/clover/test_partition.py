"""Several applications on one fleet."""

from __future__ import annotations

import pytest

from services.core.domain.solving import Progress
from services.core.policies.clover.anneal import AnnealingConfig
from services.core.policies.clover.objective import Baseline, Goal
from services.core.policies.clover.partition import Demand, Fleet, partition, split
from tests.support.clover import an_application

FLEET = Fleet(4, (0,) * 4, 1.0, 1.0)


def test_progress_goes_through_split_evaluations_and_bounds() -> None:
    demands = [Demand(name, an_application(), 15.0, sla_p95_s=0.2) for name in ("photos", "scans")]
    told: list[Progress] = []

    shares, _ = partition(demands, FLEET, 1, AnnealingConfig(), report=told.append)

    assert [each.share for each in told] == sorted(each.share for each in told)
    assert 0 < told[0].share < told[-1].share < 1
    assert "sharing out GPU 3 of 4" in {each.doing for each in told}
    assert {each.doing for each in told} >= {"photos: evaluation 1", "scans: bound, integer programme 24 of 24"}
    assert told[-1].best == pytest.approx((shares[0].objective + shares[1].objective) / 2)


def test_gpus_that_benefit_no_application_go_where_the_most_work_is() -> None:
    """One GPU is enough for either; the rest would be shared out by the rounding of the programmes' bounds."""
    demands = [Demand("light", an_application(), 3.0), Demand("heavy", an_application(), 9.0)]
    goals = [Goal(Baseline(95.0, 8.0, 0.2), max_accuracy_loss_pct=2.0)] * 2

    assert split(demands, goals, Fleet(12, (0,) * 12, 1.0, 1.0)) == [3, 9]
