"""Nodes in several zones: which grid a job draws from, and what policies make of it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lab.recording import snapshot_to_json
from lab.replay import snapshot_from_json
from services.core.cycle.grids import cluster_intensity, eligible_curves, present_curves
from services.core.cycle.plan import Plan
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.domain.carbon import CarbonCurve, mixed
from services.core.policies.greener_hours import expected_start_s, should_run
from services.core.policies.registry import build_policy
from tests.support.builders import NOON_S, a_job, a_node, a_snapshot, flat_curve, hourly_curve, story
from tests.support.harness import Harness

HOUR_S = 3_600.0
FALLING = hourly_curve([400.0] * 2 + [100.0] * 70, start_s=NOON_S)
"""Dirty for two hours from noon on, then green."""
RISING = hourly_curve([100.0] * 2 + [400.0] * 70, start_s=NOON_S)


def two_zones(*jobs: object, first: CarbonCurve = FALLING, second: CarbonCurve = RISING, **options: object) -> Snapshot:
    """Return a cluster with four A100 in zone 0, by ``first``, and four V100 in zone 1, by ``second``."""
    nodes = [a_node("n0"), a_node("n1", model="V100", zone=1)]
    return a_snapshot(list(jobs), nodes, curve=first, more_curves=[second], **options)  # type: ignore[arg-type]


def decided(name: str, snapshot: Snapshot, parameters: dict[str, object] | None = None) -> Plan:
    policy = build_policy(name, parameters or {})
    return run_cycle(policy, snapshot, policy.initial()).plan


def test_a_curve_of_two_grids_is_their_mean_by_shares_at_every_moment() -> None:
    first = CarbonCurve(np.array([0.0, 10.0]), np.array([100.0, 200.0]), 20.0)
    second = CarbonCurve(np.array([5.0]), np.array([400.0]), 25.0, np.array([True]))

    curve = mixed([first, second], [0.75, 0.25])

    assert curve.edges_s.tolist() == [0, 5, 10, 20, 25]
    assert curve.intensity_gco2_per_kwh.tolist() == [175, 175, 250, 250]
    assert curve.estimated.tolist() == [True] * 4, "before 5 s the second curve is only assumed"
    assert mixed([first, second], [1.0, 0.0]) is first


def test_a_job_that_runs_draws_by_its_share_of_gpus_in_each_zone() -> None:
    running = a_job("both", on={"n0": (0,), "n1": (0, 1, 2)})
    snapshot = two_zones(running, a_job("first", on={"n0": (1,)}), first=flat_curve(100), second=flat_curve(500))

    curves = present_curves(snapshot, np.arange(2))

    assert curves.each(lambda curve: curve.at(NOON_S)).tolist() == [400, 100]  # type: ignore[union-attr]
    assert curves.of_job(1) is snapshot.outlooks[0].curve


def test_a_job_that_waits_draws_by_the_gpus_of_the_nodes_it_may_run_on() -> None:
    nodes = [
        a_node("n0", gpus=2),
        a_node("n1", gpus=6, zone=1),
        a_node("n2", gpus=8, model="V100", zone=1),
        a_node("drained", gpus=8, schedulable=False),
    ]
    jobs = [a_job("a", models=("A100",)), a_job("any"), a_job("v", models=("V100",)), a_job("none", models=())]
    snapshot = a_snapshot(jobs, nodes, curve=flat_curve(0), more_curves=[flat_curve(24)])
    everyone = np.arange(4)

    for curves in (eligible_curves(snapshot, everyone), present_curves(snapshot, everyone)):
        assert curves.each(lambda curve: curve.at(NOON_S)).tolist() == [18, 21, 24, 14]  # type: ignore[union-attr]


def test_in_one_zone_a_job_has_the_zones_own_curve() -> None:
    snapshot = a_snapshot([a_job("a"), a_job("b", gpus=1)])

    for curves in (eligible_curves(snapshot, np.arange(2)), present_curves(snapshot, np.arange(2))):
        assert curves.of_job(1) is snapshot.outlooks[0].curve
        assert curves.of is None


def test_the_clusters_intensity_is_the_mean_by_gpus() -> None:
    nodes = [a_node("n0", gpus=1), a_node("n1", gpus=3, zone=1, schedulable=False)]

    assert cluster_intensity(a_snapshot([], nodes, curve=flat_curve(100), more_curves=[flat_curve(300)])) == 250
    assert cluster_intensity(a_snapshot([], [], curve=flat_curve(100), more_curves=[flat_curve(300)])) == 100
    assert cluster_intensity(a_snapshot([], nodes[:1], curve=flat_curve(70))) == 70
    unused = [flat_curve(300), flat_curve(900)]  # a zone that no node is in
    assert cluster_intensity(a_snapshot([], nodes, curve=flat_curve(100), more_curves=unused)) == 250


def test_green_with_slack_holds_what_its_nodes_zone_makes_worth_waiting_for() -> None:
    """Two that have finished scaling, half done after an hour; the one in the zone that gets greener stops."""
    jobs = [
        a_job(
            f"{node}",
            on={node: (0,)},
            models=(model,),
            attained_gpu_s=HOUR_S,
            progress=0.5,
            gpu_power_w=300.0,
            submitted_s=NOON_S - HOUR_S,
            waiting_since_s=NOON_S - HOUR_S,
        )
        for node, model in (("n0", "A100"), ("n1", "V100"))
    ]

    plan = decided("green", two_zones(*jobs), {"slack_s": 12 * HOUR_S, "unmeasured_s": 0.0})

    assert {job: words.split()[0] for job, words in story(plan).items()} == {"n0": "preempt"}


def test_green_shifts_each_job_by_the_hour_of_its_own_zone() -> None:
    """Both draw alike and have emitted alike: the one whose zone is green now goes first for the GPUs that are left."""
    lower = [
        a_job(
            name,
            models=(model,),
            gpu_power_w=watts,
            carbon_gco2=10.0,
            attained_gpu_s=10.0,
            submitted_s=NOON_S - 100,
            waiting_since_s=NOON_S - 100,
        )
        for name, model, watts in (("a-dirty", "A100", 300.0), ("b-green", "V100", 300.0), ("c", "V100", 100.0))
    ]
    policy = build_policy("green", {"mu": 4.0})
    memory = policy.load({"ranking": [[job.name, 1, True] for job in lower]})

    after = run_cycle(policy, two_zones(*lower), memory).memory
    ranked = [after.jobs[at] for at in after.order]

    assert ranked.index("b-green") < ranked.index("a-dirty")


def test_a_job_goes_on_unless_both_its_nodes_grid_and_that_of_all_it_may_use_are_dirty() -> None:
    """Otherwise what one stops the other would start again at once, on the same nodes."""
    left_s, due_s = np.full(1, HOUR_S), np.full(1, NOON_S + 12 * HOUR_S)
    first = np.array([0])

    def goes_on(job: object, nodes: list[str]) -> bool:
        rows = [a_node("n0"), a_node("n1", zone=1)]
        snapshot = a_snapshot([job], [rows[int(name[1])] for name in nodes], curve=FALLING, more_curves=[RISING])  # type: ignore[list-item]
        return bool(should_run(snapshot, first, left_s, due_s)[0])

    assert not goes_on(a_job("a", on={"n0": (0,)}), ["n0"])
    assert goes_on(a_job("a", on={"n1": (0,)}), ["n1"])
    assert goes_on(a_job("a", on={"n0": (0,)}), ["n0", "n1"]), "their mean is flat: nothing to wait for"
    assert goes_on(a_job("a"), ["n0", "n1"])
    wide = [a_node("n0", gpus=8), a_node("n1", gpus=2, zone=1)]
    for job, runs in ((a_job("a", on={"n1": (0,)}), True), (a_job("a", on={"n0": (0,)}), False), (a_job("a"), False)):
        snapshot = a_snapshot([job], wide, curve=FALLING, more_curves=[RISING])
        assert should_run(snapshot, first, left_s, due_s).tolist() == [runs]
        assert expected_start_s(snapshot, first, left_s, due_s).tolist() == [NOON_S + 2 * HOUR_S]


@pytest.mark.parametrize(("policy", "parameters"), [("green", {"slack_s": 12 * HOUR_S})])
def test_jobs_in_two_zones_end_and_none_is_stopped_and_started_all_the_time(
    policy: str, parameters: dict[str, object]
) -> None:
    """Two zones whose green hours alternate; a gang of six always spans both."""
    waves = [
        hourly_curve([300.0 + 200.0 * np.sin((hour + shift) / 24 * 2 * np.pi) for hour in range(24 * 20)])
        for shift in (0, 7)
    ]
    nodes = [a_node("n0"), a_node("n1", zone=1)]
    cluster = Harness(policy, parameters, nodes=nodes, curve=waves[0], more_curves=waves[1:])
    for at in range(3):
        cluster.submit(f"j{at}", work_s=2 * HOUR_S, at_s=at * 2 * HOUR_S, min_gpus=6 if at == 1 else 1)

    cluster.run_until_idle()

    assert len(cluster.ended) == 3
    assert all(job.preemptions <= 6 for job in cluster.ended.values())


def test_a_recording_keeps_zones_and_one_of_a_single_zone_can_still_be_read() -> None:
    snapshot = two_zones(a_job("a"), a_job("b", phase=Phase.QUEUED), trigger=Trigger.PASSIVE)
    written = json.loads(json.dumps(snapshot_to_json(snapshot)))
    read = snapshot_from_json(written)
    (first, second) = written.pop("outlooks")
    del written["nodes"]["zone"], first["estimated"]
    old = snapshot_from_json(written | {"carbon": first})

    assert read.nodes.zone.tolist() == [0, 1]
    assert [outlook.zone for outlook in read.outlooks] == ["GB", "SE"]
    assert read.outlooks[1].curve.intensity_gco2_per_kwh.tolist() == second["intensity_gco2_per_kwh"]
    assert (len(old.outlooks), old.nodes.zone.tolist(), old.outlooks[0].zone) == (1, [0, 0], "GB")
