"""No policy's run emits less than the bound for its levers, its slack and its own completion times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from lab.experiments.bound import ALL_LEVERS, Slack, least_of_run, levers_of, slack_of
from lab.experiments.hosts import LabOptions
from services.core.domain.errors import DomainError
from services.core.policies.registry import POLICIES
from services.simulator.engine import EngineOptions, SimulationResult, simulate
from services.simulator.recipes.measured import flat_profile, tuning_profile
from services.simulator.workload import CarbonTrace, ClusterSpec, Workload
from tests.support.workloads import a_trace, a_workload

KINDS = (tuning_profile("shufflenet", 64), tuning_profile("deepspeech2", 20), flat_profile("flat", 0.4))
CLUSTERS = tuple(map(ClusterSpec.parse, ("2x2:RTX3090", "1x4:RTX3090", "2x1:RTX3090,1x2:V100")))
VARIANTS: list[tuple[str, dict[str, object]]] = [
    *((name, {"packing": False} if name == "gandiva" else {}) for name in POLICIES),
    ("joint", {"hour_wh": 0.0, "widest_gpus": 4, "slack_s": 14_400.0}),
    ("joint", {"limits": False, "sleep_after_s": None}),
    ("green", {"slack_s": 14_400.0, "slack_share": 1.0}),
    ("powerflow", {"eta": 0.5, "power_down": False}),
    ("las", {"gang": "max"}),
]


@st.composite
def jobs(draw: st.DrawFn) -> Workload:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 7_200), st.sampled_from([60.0, 900.0, 5_000.0, 20_000.0]), st.sampled_from([1, 1, 2])
            ),
            min_size=2,
            max_size=7,
        )
    )
    kinds = draw(st.lists(st.integers(0, len(KINDS) - 1), min_size=len(rows), max_size=len(rows)))
    ordered = sorted((float(at), work, gpus) for at, work, gpus in rows)
    return a_workload(ordered, KINDS, profile=kinds, most=draw(st.sampled_from([None, 4])))


def checked(
    name: str,
    parameters: dict[str, object],
    workload: Workload,
    cluster: ClusterSpec,
    trace: CarbonTrace,
    options: EngineOptions,
    *more: Slack,
) -> SimulationResult:
    """Return the run of a policy, which emitted no less than its bounds: by its levers and by all, at each slack."""
    rigid = not POLICIES[name].elastic and "gang" not in parameters
    options = replace(options, rigid=rigid)
    run = simulate(name, workload, cluster, trace, parameters=parameters, options=options)
    if "eta" in parameters and np.isnan(run.columns.jct_s).any():
        reject()  # a gang may never fit in half the power
    own = levers_of(name, parameters, options)
    for levers in (own, ALL_LEVERS):
        for slack in (slack_of(name, parameters), *more):
            bound = least_of_run(
                workload,
                cluster,
                trace,
                options,
                levers,
                jct_s=run.columns.jct_s,
                makespan_s=run.makespan_s,
                slack=slack,
            )
            assert bound.carbon_gco2 / 1_000 <= run.carbon_kg + 1e-9 * abs(run.carbon_kg) + 1e-12, levers
    return run


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> tuple[Workload, ClusterSpec, CarbonTrace, EngineOptions]:
    hours = draw(st.lists(st.sampled_from([-30.0, 20.0, 100.0, 450.0]), min_size=24, max_size=24))
    options = LabOptions(
        round_interval_s=600.0,
        power_down_after_s=draw(st.sampled_from([None, 60.0])),
        node_mtbf_s=draw(st.sampled_from([None, None, 20_000.0])),
        power_limit_w=draw(st.sampled_from([None, None, 200.0])),
        batch_tuning=draw(st.sampled_from(["all", "half", "none"])),
        host_per_job_w=draw(st.sampled_from([None, None, 100.0])),
    )
    return draw(jobs()), draw(st.sampled_from(CLUSTERS)), a_trace(hours), options


@pytest.mark.parametrize("name", ["green", "joint", "las", "pollux", "powerflow", "zeus+las"])
@settings(max_examples=3, deadline=None)
@given(run=settings_of_a_run())
def test_no_run_is_below_its_bounds(name: str, run: tuple[Workload, ClusterSpec, CarbonTrace, EngineOptions]) -> None:
    checked(name, {}, *run)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters"), VARIANTS, ids=[f"{name}-{len(given)}" for name, given in VARIANTS])
@settings(max_examples=8, deadline=None)
@given(run=settings_of_a_run())
def test_no_run_of_any_policy_is_below_its_bounds(
    name: str, parameters: dict[str, object], run: tuple[Workload, ClusterSpec, CarbonTrace, EngineOptions]
) -> None:
    checked(name, parameters, *run, Slack(), Slack(86_400.0))


def test_a_lone_job_on_a_flat_grid_reaches_the_bound_of_its_levers() -> None:
    workload = a_workload([(0.0, 36_000.0, 1)], KINDS, profile=[2])
    grid, options = a_trace((300.0,) * 48), EngineOptions()

    run = checked("fifo", {}, workload, CLUSTERS[0], grid, options)
    given = {"jct_s": run.columns.jct_s, "makespan_s": run.makespan_s, "slack": Slack()}
    own = least_of_run(
        workload,
        CLUSTERS[0],
        grid,
        replace(options, rigid=True),
        levers_of("fifo", {}, replace(options, rigid=True)),
        **given,
    )

    assert own.carbon_gco2 / 1_000 == pytest.approx(run.carbon_kg, rel=2e-3)  # but for 30 s to start


def test_each_lever_lowers_the_bound_where_it_helps() -> None:
    workload = a_workload([(0.0, 20_000.0, 1), (600.0, 9_000.0, 1)], KINDS, profile=[1, 1], most=4)
    grid, cluster = a_trace([450.0, 100.0] * 24), CLUSTERS[0]
    options = EngineOptions(rigid=True)
    run = checked("las", {}, workload, cluster, grid, options)

    def bound(**levers: bool) -> float:
        none = dict.fromkeys(("widths", "batches", "controls", "sleep"), False)
        own = replace(ALL_LEVERS, **{**none, **levers})
        given = {"jct_s": run.columns.jct_s, "makespan_s": run.makespan_s, "slack": Slack()}
        return least_of_run(workload, cluster, grid, options, own, **given).carbon_gco2

    plain = bound()
    for lever in ("widths", "batches", "controls", "sleep"):
        assert bound(**{lever: True}) < 0.995 * plain, lever
    assert bound(widths=True, batches=True, controls=True, sleep=True) < min(
        bound(controls=True, sleep=True), bound(batches=True, sleep=True)
    )


def test_levers_are_those_of_the_policy_and_its_options() -> None:
    def of(name: str, parameters: dict[str, object] | None = None, **options: object) -> str:
        return levers_of(name, parameters or {}, EngineOptions(**options)).words  # type: ignore[arg-type]

    assert of("las", rigid=True) == "hours"
    assert of("las", rigid=True, power_down_after_s=300.0) == "hours, sleep"
    assert of("zeus+las", rigid=True) == "hours, limits"
    assert of("green") == "hours, widths"
    assert of("pollux") == "hours, widths, batches"
    assert of("joint") == ALL_LEVERS.words == "hours, widths, batches, limits, sleep"
    assert of("joint", {"limits": False, "sleep_after_s": None}) == "hours, widths, batches"
    assert of("powerflow", {"power_down": False}) == "hours, widths, limits"
    assert of("fair+las", rigid=True) == "hours"
    late = levers_of("joint", {"sleep_after_s": 1e9}, EngineOptions(), lasts_s=86_400.0)
    assert late.words == "hours, widths, batches, limits", "no node sleeps that would only after the run"


def test_jobs_that_share_a_gpu_have_no_bound() -> None:
    with pytest.raises(DomainError, match="share a GPU"):
        levers_of("gandiva", {"packing": True}, EngineOptions())


def test_a_run_that_left_work_has_no_bound() -> None:
    workload = a_workload([(0.0, 36_000.0, 1)], KINDS, profile=[2])
    with pytest.raises(DomainError, match="left jobs undone"):
        least_of_run(
            workload,
            CLUSTERS[0],
            a_trace(),
            EngineOptions(),
            ALL_LEVERS,
            jct_s=np.array([np.nan]),
            makespan_s=1.0,
            slack=Slack(),
        )
