"""The least carbon of any run, against hand computation, the programme itself and exhaustive search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lab.bounds.modes import LeastCarbon, Modes, ModesProblem, least_carbon
from services.core.domain.errors import DomainError
from services.core.domain.solving import SolveStatus
from services.core.solvers.model import ModelBuilder
from services.core.solvers.solve import solve
from tests.support.builders import hourly_curve

HOUR_S = 3_600.0


def modes(*rows: tuple[float, ...], stages: int = 1) -> Modes:
    """Return modes given as (speed, watts, GPUs[, stage])."""
    speed, watts, gpus, *stage = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    none = np.zeros(speed.size, dtype=np.int64)
    return Modes(speed, watts, gpus, none, stage[0].astype(np.int64) if stage else none, stages)


def a_problem(
    intensities: list[float],
    gpus: float,
    jobs: list[tuple[Modes, float, float, float]],
    *,
    idle_w: float = 0.0,
    sleeps: bool = True,
) -> ModesProblem:
    """Return jobs given as (modes, work, hour of release, hour of the deadline)."""
    own, work, release, deadline = zip(*jobs, strict=True)
    kinds = tuple({id(each): each for each in own}.values())
    return ModesProblem(
        hourly_curve(intensities, start_s=0.0),
        np.array([gpus]),
        np.array([idle_w]),
        sleeps,
        kinds,
        np.array([next(at for at, kind in enumerate(kinds) if kind is each) for each in own]),
        np.array(work, dtype=np.float64),
        HOUR_S * np.array(release, dtype=np.float64),
        HOUR_S * np.array(deadline, dtype=np.float64),
    )


def test_a_job_takes_the_greenest_hours_of_its_window() -> None:
    one = modes((1.0, 500.0, 1))
    # Two hours' work between 0:30 and 4:00: the hours of 100 and 200 g; the hour of 50 g comes after the deadline.
    found = least_carbon(a_problem([300, 200, 100, 400, 50], 4, [(one, 2, 0.5, 4)]))
    assert found.carbon_gco2 == pytest.approx(0.5 * (100 + 200))
    assert found.used_gpu_hours.tolist() == [[0, 1, 1, 0, 0]]
    # With a start of six minutes, in which it draws as much.
    late = least_carbon(a_problem([300, 200, 100, 400, 50], 4, [(replace(one, start_h=0.1), 1.5, 0.5, 4)]))
    assert late.carbon_gco2 == pytest.approx(0.5 * (100 + 0.6 * 200))


def test_a_job_is_no_wider_than_its_widest_gang_and_grows_only_where_that_pays() -> None:
    # Wide: twice as fast at 2.5 times the power. Four units of work in three hours.
    wide = modes((1.0, 400.0, 1), (2.0, 1000.0, 2))
    # All hours alike: one hour wide and two hours narrow are needed, and are enough.
    assert least_carbon(a_problem([100] * 3, 64, [(wide, 4, 0, 3)])).carbon_gco2 == pytest.approx(100 * (1 + 0.8))
    # A green hour: wide there; 64 free GPUs do not help further.
    found = least_carbon(a_problem([400, 10, 400, 400], 64, [(wide, 4, 0, 4)]))
    assert found.carbon_gco2 == pytest.approx(10 * 1.0 + 400 * 0.8)


def test_idle_power_is_sunk_where_nodes_stay_on_and_nothing_where_they_sleep() -> None:
    # A mode of half the power takes twice as long. Above 100 W of idling it takes 50 W, not 150 of 200.
    jobs = [(modes((1.0, 200.0, 1), (0.5, 120.0, 1)), 1.0, 0, 2)]
    asleep = least_carbon(a_problem([100, 100], 2, jobs, idle_w=100))
    assert asleep.carbon_gco2 == pytest.approx(100 * 0.2)
    awake = least_carbon(a_problem([100, 100], 2, jobs, idle_w=100, sleeps=False))
    assert awake.carbon_gco2 == pytest.approx(100 * (0.1 * 4 + 2 * 0.02))  # at half speed it adds 20 W for two hours


def test_negative_hours_are_taken_awake() -> None:
    found = least_carbon(a_problem([-100, 100], 2, [(modes((1.0, 300.0, 1)), 1, 0, 2)], idle_w=50))
    assert found.carbon_gco2 == pytest.approx(-100 * (0.3 + 0.05))


def test_scarce_gpus_push_jobs_into_other_hours() -> None:
    jobs = [(modes((1.0, 300.0, 1)), 1.0, 0, 2), (modes((1.0, 100.0, 1)), 1.0, 0, 2)]
    found = least_carbon(a_problem([100, 200], 1, jobs))
    assert found.carbon_gco2 == pytest.approx(0.3 * 100 + 0.1 * 200, rel=1e-3)
    assert found.carbon_gco2 <= 0.3 * 100 + 0.1 * 200 + 1e-9
    assert found.price_gco2[0, 0] > 0


def test_what_cannot_be_done_or_be_is_refused() -> None:
    one = modes((1.0, 500.0, 1))
    with pytest.raises(DomainError, match="1 jobs cannot be done in their windows"):
        least_carbon(a_problem([100, 100], 1, [(one, 2, 0.5, 2)]))
    with pytest.raises(DomainError, match="speed above 0"):
        modes((0.0, 1.0, 1))
    with pytest.raises(DomainError, match="every stage"):
        modes((1.0, 1.0, 1, 1), stages=2)
    with pytest.raises(DomainError, match="work above 0"):
        a_problem([100], 1, [(one, 0, 0, 1)])


def programme(problem: ModesProblem) -> float | None:
    """Return the optimum of the programme as printed, by HiGHS."""
    builder, hours = ModelBuilder(), problem.curve.times_s.size
    sunk = np.full(hours, not problem.sleeps) | (problem.curve.intensity_gco2_per_kwh < 0)
    intensity, idle_kw = problem.curve.intensity_gco2_per_kwh, problem.idle_w[0] / 1000 * sunk
    jobs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for kind, work, release, deadline in zip(
        problem.kind, problem.work, problem.release_s / HOUR_S, problem.deadline_s / HOUR_S, strict=True
    ):
        own = problem.kinds[kind]
        step, mode = (each.reshape(-1) for each in np.mgrid[:hours, : own.speed.size])
        within = np.clip(np.minimum(step + 1, deadline) - np.maximum(step, release), 0, None)
        cost = intensity[step] * (own.power_w[mode] / 1000 - idle_kw[step] * own.gpus[mode])
        columns = builder.add_variables(step.size, cost=cost)
        per_stage = np.full(own.stages, work / own.stages)
        per_stage[0] += own.start_h * own.speed[own.stage == 0].min()
        builder.add_rows(own.stages, (own.stage[mode], columns, own.speed[mode]), lower=per_stage)
        builder.add_rows(hours, (step, columns, 1.0), upper=within[np.arange(hours) * own.speed.size])
        jobs.append((step, columns, own.gpus[mode]))
    steps, columns, gpus = (np.concatenate(each) for each in zip(*jobs, strict=True))
    builder.add_rows(hours, (steps, columns, gpus), upper=problem.gpus[0])
    solved = solve(builder.build(offset=float(problem.gpus[0] * (intensity * idle_kw).sum())))
    return solved.objective if solved.status is SolveStatus.OPTIMAL else None


@pytest.mark.parametrize("sleeps", [True, False])
def test_it_comes_close_to_the_programme_where_gpus_are_scarce(sleeps: bool) -> None:
    random = np.random.default_rng(4)
    kinds = [modes((1, 200, 1), (0.7, 110, 1), (1.8, 420, 2), (3.2, 900, 4)), modes((1, 300, 1), (2.1, 610, 2))]
    arrivals = np.sort(random.uniform(0, 18, 60))
    jobs = [
        (kinds[at % 2], float(random.lognormal(0.0, 0.8)), float(arrival), 24.0) for at, arrival in enumerate(arrivals)
    ]
    day = (250 + 150 * np.sin(np.arange(24) / 24 * 2 * np.pi) + random.normal(0, 20, 24)).tolist()
    problem = a_problem(day, 8, jobs, idle_w=40, sleeps=sleeps)
    truth = programme(problem)
    found = least_carbon(problem)

    assert truth is not None
    assert (found.price_gco2 > 0).any()
    assert 0.99 * truth <= found.carbon_gco2 <= truth * (1 + 1e-9)
    again = least_carbon(problem, found.price_gco2)
    assert found.carbon_gco2 * (1 - 1e-9) <= again.carbon_gco2 <= truth * (1 + 1e-9)
    anywhere = least_carbon(problem, random.uniform(0, 200, (1, 24)))
    assert anywhere.carbon_gco2 <= truth * (1 + 1e-9)


@dataclass(frozen=True)
class Case:
    """A problem of whole hours, on nodes."""

    problem: ModesProblem
    nodes: int
    per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two or three jobs of one or two stages and up to two choices, in up to three hours, on up to two nodes."""
    nodes, per_node, hours = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(2, 3))
    jobs: list[tuple[Modes, float, float, float]] = []
    for _ in range(draw(st.integers(2, 3))):
        stages = draw(st.integers(1, 2))
        choices = [
            (draw(st.integers(1, nodes * per_node)), draw(st.sampled_from([0.5, 1.0])))
            for _ in range(draw(st.integers(1, 2)))
        ]
        rows = [
            (factor * size**0.5 * draw(st.sampled_from([0.6, 1.0, 1.7])), 300.0 * size * factor**2, size, stage)
            for stage in range(stages)
            for size, factor in choices
        ]
        release = draw(st.integers(0, hours - 1))
        deadline = draw(st.integers(release + 1, hours))
        own = replace(modes(*rows, stages=stages), start_h=draw(st.sampled_from([0.0, 0.25])))
        jobs.append((own, draw(st.sampled_from([0.3, 1.0, 1.6])), release, deadline))
    intensities = draw(st.lists(st.sampled_from([-40.0, 20.0, 100.0, 500.0]), min_size=hours, max_size=hours))
    idle_w, sleeps = draw(st.sampled_from([0.0, 60.0])), draw(st.booleans())
    return Case(a_problem(intensities, nodes * per_node, jobs, idle_w=idle_w, sleeps=sleeps), nodes, per_node)


def runs_on(own: Modes, choice: int, left: float, whole: float) -> Iterator[tuple[float, float, float]]:
    """Yield until when a job with this work left runs in an hour, at which power, and what is left then."""
    per_stage, choices, clock = whole / own.stages, own.speed.size // own.stages, 0.0
    if left == whole:
        clock = own.start_h
        yield clock, float(own.power_w[choice]), left
    while left > 1e-12 and clock < 1 - 1e-12:
        stage = min(int((whole - left) / per_stage + 1e-9), own.stages - 1)
        mode = stage * choices + choice
        upto = min(1.0, clock + (left - whole * (1 - (stage + 1) / own.stages)) / own.speed[mode])
        left = max(left - (upto - clock) * own.speed[mode], 0.0)
        clock = upto
        yield upto, float(own.power_w[mode]), left


def hour_of(
    case: Case, hour: int, picks: tuple[int, ...], left: tuple[float, ...]
) -> tuple[float, tuple[float, ...]] | None:
    """Return what an hour emits in which jobs run in these choices, -1 for none, and the work left; None: no room."""
    problem, intensity = case.problem, float(case.problem.curve.intensity_gco2_per_kwh[hour])
    held: list[tuple[float, int]] = []
    energy_kwh, after = 0.0, list(left)
    for job, pick in enumerate(picks):
        if pick < 0:
            continue
        own, clock = problem.kinds[problem.kind[job]], 0.0
        for upto, watts, rest in runs_on(own, pick, left[job], float(problem.work[job])):
            energy_kwh += (upto - clock) * watts / 1000
            clock, after[job] = upto, rest
        held.append((clock, int(own.gpus[pick])))
    if sum(size for _, size in held) > case.gpus:
        return None
    for begin, end in zip([0.0, *sorted(end for end, _ in held)], [*sorted(end for end, _ in held), 1.0], strict=True):
        busy = sum(size for until, size in held if until > begin)
        least = -(-busy // case.per_node) if problem.sleeps else case.nodes
        idle_kwh = [
            (end - begin) * (awake * case.per_node - busy) * problem.idle_w[0] / 1000
            for awake in range(least, case.nodes + 1)
        ]
        energy_kwh += min(idle_kwh) if intensity >= 0 else max(idle_kwh)
    return intensity * energy_kwh, tuple(after)


def best_of_all(case: Case) -> float | None:
    """Return the least that any schedule emits which begins and changes gangs at full hours; None: there is none."""
    problem = case.problem
    own_modes = [problem.kinds[kind] for kind in problem.kind]
    states: dict[tuple[float, ...], float] = {tuple(problem.work.tolist()): 0.0}
    for hour in range(problem.curve.times_s.size):
        found: dict[tuple[float, ...], float] = {}
        for left, so_far in states.items():
            may = [
                [-1, *range(own.speed.size // own.stages)] if rest > 0 and release <= hour * HOUR_S < deadline else [-1]
                for own, rest, release, deadline in zip(
                    own_modes, left, problem.release_s, problem.deadline_s, strict=True
                )
            ]
            for picks in product(*may):
                done = hour_of(case, hour, picks, left)
                if done is not None:
                    found[done[1]] = min(found.get(done[1], np.inf), so_far + done[0])
        states = found
    return min((emitted for left, emitted in states.items() if not any(left)), default=None)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_no_schedule_is_below_it(case: Case) -> None:
    best = best_of_all(case)
    assume(best is not None)
    found = least_carbon(case.problem)

    assert best is not None
    assert found.carbon_gco2 <= best + 1e-6 * max(abs(best), 1.0)
    truth = programme(case.problem)
    assert truth is not None
    assert found.carbon_gco2 <= truth + 1e-6 * max(abs(truth), 1.0)


def test_a_lever_less_never_lowers_it() -> None:
    own = modes((1, 200, 1, 0), (0.7, 110, 1, 0), (1.8, 420, 2, 0), (1.2, 200, 1, 1), (2.6, 420, 2, 1), stages=2)
    problem = a_problem([300, 100, 200, 50], 2, [(own, 1.5, 0, 3), (own, 1.0, 1, 4)], idle_w=50)
    all_levers = least_carbon(problem).carbon_gco2

    def without(**changes: object) -> LeastCarbon:
        return least_carbon(replace(problem, **changes))

    assert without(kinds=(own.take(own.gpus == 1),)).carbon_gco2 >= all_levers
    assert without(sleeps=False).carbon_gco2 >= all_levers
    assert without(deadline_s=problem.deadline_s - 1800).carbon_gco2 >= all_levers
    assert without(gpus=np.array([1.0]), kinds=(own.take(own.gpus == 1),)).carbon_gco2 >= all_levers
