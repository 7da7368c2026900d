"""What each lever does for a job: the way that was chosen against the same without the lever."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId
from services.core.policies.joint.config import JointConfig
from services.core.policies.joint.policy import Joint
from services.core.policies.levers import (
    BatchRecord,
    Effect,
    ExplainsLevers,
    Lever,
    LimitRecord,
    SizeRecord,
    Way,
    batches_in_ledger,
    carbon_g,
    compared,
    limits_in_ledger,
    width_in_ledger,
)
from tests.support.builders import NOON_S, a_job, a_node, a_snapshot, by_zone, hourly_curve

HOUR_S = 3_600.0
GRID = hourly_curve([400.0] * 2 + [100.0] * 4 + [400.0] * 42, start_s=NOON_S)
FLAT = hourly_curve([200.0] * 48, start_s=NOON_S)


def told(snapshot: Snapshot, job_id: str = "a", **parameters: object) -> dict[Lever, Effect]:
    policy = Joint(JointConfig(**{"host_w": 60.0, **parameters}))  # pyright: ignore[reportArgumentType]
    assert isinstance(policy, ExplainsLevers)
    memory = run_cycle(policy, snapshot, policy.initial()).memory
    return {each.lever: each for each in policy.levers(snapshot, memory, JobId(job_id))}


def figures(effect: Effect) -> tuple[float | None, float | None]:
    return effect.carbon_saved_gco2, effect.minutes_added


def waiting(curve: object = FLAT, **columns: object) -> Snapshot:
    """Return a job of two hours on one GPU, 250 W and 60 W of its host, that may have up to two."""
    job = a_job("a", **{"min_gpus": 1, "max_gpus": 2, "gpu_power_w": 250.0, **columns})
    seen = a_snapshot([job], [a_node(gpus=4)], curve=curve)  # type: ignore[arg-type]
    jobs = replace(seen.jobs, remaining_s=np.array([2 * HOUR_S]), speed_curve=np.array([0]))
    return replace(seen, jobs=jobs, speed_curves=np.array([[1.0, 1.6]]))


def test_a_way_is_its_draw_in_its_hours() -> None:
    way = Way(1_000.0, ((NOON_S, NOON_S + HOUR_S), (NOON_S + 2 * HOUR_S, NOON_S + 3 * HOUR_S)))

    assert carbon_g(GRID, way) == pytest.approx(400 + 100)
    assert (way.busy_s, way.end_s) == (2 * HOUR_S, NOON_S + 3 * HOUR_S)
    assert carbon_g(GRID, way.at_once(NOON_S)) == pytest.approx(800)
    assert way.slower(0.75, 1.0).runs == ((NOON_S, NOON_S + HOUR_S), (NOON_S + 2 * HOUR_S, NOON_S + 2.5 * HOUR_S))
    assert way.slower(0.25, 1.0).runs == ((NOON_S, NOON_S + 0.5 * HOUR_S),)
    beyond = Way(1_000.0, ((GRID.end_s, GRID.end_s + HOUR_S),))
    assert carbon_g(GRID, beyond) == pytest.approx(400), "beyond the forecast its last day counts"
    effect = compared(Lever.HOURS, GRID, way, way.at_once(NOON_S), "")
    assert figures(effect) == (pytest.approx(300), 60.0)


def test_width_is_compared_with_the_smallest_gang() -> None:
    wide = told(waiting(), hour_wh=300.0, limits=False)[Lever.WIDTH]
    narrow = told(waiting(), hour_wh=0.0, limits=False)[Lever.WIDTH]

    watts = 2 * (250 * (0.8 + 0.2 * 0.3) + 60)
    assert wide.carbon_saved_gco2 == pytest.approx((310 * 2.0 - watts * 2.0 / 1.6) / 1000 * 200)
    assert wide.minutes_added == pytest.approx(120 / 1.6 - 120)
    assert figures(narrow) == (0.0, 0.0)


def test_a_job_that_waits_for_greener_hours_is_compared_with_one_that_does_not() -> None:
    effects = told(waiting(GRID, deadline_s=NOON_S + 12 * HOUR_S), hour_wh=0.0, limits=False)

    assert figures(effects[Lever.HOURS]) == (pytest.approx(0.310 * 2 * 300), pytest.approx(120.0))
    assert figures(told(waiting(GRID), hour_wh=0.0, limits=False)[Lever.HOURS]) == (0.0, 0.0), "it has no deadline"


def test_a_power_limit_is_compared_with_the_default() -> None:
    """At 200 W of 300 W a GPU does 0.9 of the work for 0.6 of the draw."""
    seen = waiting()
    curve = ControlCurve(np.array([200.0, 300.0]), np.array([0.9, 1.0]), np.array([150.0, 250.0]))
    jobs = replace(seen.jobs, control_curve=np.array([0]))
    settable = (frozenset({ControlKind.POWER_LIMIT}),)
    seen = replace(seen, jobs=jobs, control_curves=({(0, ControlKind.POWER_LIMIT): curve},), settable=settable)
    effect = told(seen, hour_wh=0.0)[Lever.POWER_LIMIT]

    assert effect.carbon_saved_gco2 == pytest.approx((310 * 2.0 - 210 * 2.0 / 0.9) / 1000 * 200)
    assert effect.minutes_added == pytest.approx(120 / 0.9 - 120)
    assert figures(told(waiting())[Lever.POWER_LIMIT]) == (None, None), "nothing is known of its kind"


def test_a_batch_is_compared_with_the_users_own() -> None:
    seen = waiting()
    jobs = replace(seen.jobs, batch_min=np.array([64]), batch_max=np.array([512]), goodput_curve=np.array([0]))
    curves = np.array([[[1.25, 2.0]] * 2])
    tuned = replace(
        seen,
        jobs=jobs,
        goodput_curves=curves,
        goodput_batches=np.array([[[128, 256]] * 2]),
        goodput_gains=np.array([[[1.25, 1.5]] * 2]),
    )
    effect = told(tuned, hour_wh=0.0, limits=False)[Lever.BATCH]

    assert figures(effect) == (pytest.approx(0.310 * 2 * 0.25 * 200), pytest.approx(-30.0))
    assert figures(told(replace(tuned, goodput_gains=np.empty((0, 2, 0))))[Lever.BATCH]) == (None, None)
    assert figures(told(seen)[Lever.BATCH]) == (0.0, 0.0)


def test_the_order_is_compared_with_that_of_submission() -> None:
    """`b` came first and is longer: `a` goes before its 4 hours on 4 GPUs."""
    rows = [
        a_job("a", min_gpus=4, gpu_power_w=250.0),
        a_job("b", min_gpus=4, gpu_power_w=250.0, submitted_s=NOON_S - 7_200),
    ]
    seen = a_snapshot(rows, [a_node(gpus=4)], curve=FLAT)
    seen = replace(seen, jobs=replace(seen.jobs, remaining_s=np.array([HOUR_S, 4 * HOUR_S])))

    assert figures(told(seen, "a")[Lever.ORDER]) == (pytest.approx(0.0), pytest.approx(-240.0))
    assert figures(told(seen, "b")[Lever.ORDER]) == (pytest.approx(0.0), pytest.approx(60.0))


def test_gpus_of_a_job_that_waits_may_sleep() -> None:
    seen = waiting(GRID, deadline_s=NOON_S + 12 * HOUR_S)
    asleep = replace(seen, nodes=replace(seen.nodes, may_sleep=np.array([True])), idle_w=np.array([80.0]))

    saved, minutes = figures(told(asleep, hour_wh=0.0, limits=False)[Lever.SLEEP])
    assert (saved, minutes) == (pytest.approx(0.080 * 2 * 400), None)
    assert figures(told(seen, hour_wh=0.0, limits=False)[Lever.SLEEP]) == (0.0, 0.0)


def test_without_a_length_everything_is_unknown() -> None:
    seen = waiting()
    seen = replace(seen, jobs=replace(seen.jobs, remaining_s=np.array([np.nan])))

    assert {figures(each) for each in told(seen).values()} == {(None, None)}


def test_the_ledger_tells_what_widths_did() -> None:
    """One GPU: 100 J and 10 s a unit; two: 120 J and 6 s."""
    one, two = SizeRecord(1, 10, 1_000, 100), SizeRecord(2, 30, 3_600, 180)

    assert figures(width_in_ledger([one, two], 1, 0.01)) == (pytest.approx(-6.0), pytest.approx(-2.0))
    assert figures(width_in_ledger([one], 1, 0.01)) == (0.0, 0.0)
    assert figures(width_in_ledger([two], 1, 0.01)) == (None, None)
    assert figures(width_in_ledger([], 1, 0.01)) == (None, None)


def test_the_ledger_tells_what_limits_did() -> None:
    """Two GPUs for 100 s at 80 W and 0.9 of their speed, beside 20 W of host: at 120 W they would have taken 90 s."""
    limited = LimitRecord(2, 100.0, 0.9, 80.0, 120.0)
    free = LimitRecord(1, 50.0, 1.0, 120.0, 120.0)

    expected = 2 * (140.0 * 90.0 - 100.0 * 100.0) * 0.01, 10.0 / 60.0
    assert figures(limits_in_ledger([limited, free], 20.0, 0.01)) == pytest.approx(expected)


def test_the_ledger_tells_what_batches_did() -> None:
    """A gang of 300 J in 60 s did a quarter more than with the base batch: that would have taken 75 s and 375 J."""
    effect = batches_in_ledger([BatchRecord(60.0, 300.0, 1.25)], 0.01)

    assert figures(effect) == pytest.approx((0.75, -0.25))


def test_in_a_cluster_without_nodes_there_is_nothing_to_tell() -> None:
    assert told(a_snapshot([a_job("a", min_gpus=1)], [])) == {}


def test_a_zone_is_compared_with_the_mean_of_all_that_the_job_may_use() -> None:
    """It runs for two hours at 310 W on a quarter of the mean intensity; in one zone there is no such lever."""
    job = a_job("a", on={"n1": (0,)}, gpu_power_w=250.0, remaining_s=2 * HOUR_S)
    nodes = [a_node("n0"), a_node("n1", zone=1)]
    dirty, clean = hourly_curve([700.0] * 48, start_s=NOON_S), hourly_curve([100.0] * 48, start_s=NOON_S)
    seen = by_zone(a_snapshot([job], nodes, curve=dirty, more_curves=[clean]))

    zone = told(seen)[Lever.ZONE]
    waits = told(by_zone(a_snapshot([a_job("a", remaining_s=2 * HOUR_S)], nodes, curve=dirty, more_curves=[clean])))

    assert figures(zone) == pytest.approx((0.31 * 2 * (400.0 - 100.0), 0.0))
    assert figures(waits[Lever.ZONE]) == (None, None)
    assert waits[Lever.ZONE].detail.endswith("now in SE.")
    assert Lever.ZONE not in told(waiting())
