"""Every backend gives the same answer, and says how far it can be trusted."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.domain.errors import DomainError
from services.core.domain.solving import Backend, Progress, SolveStatus
from services.core.solvers import highs
from services.core.solvers.model import LinearModel, ModelBuilder, Patience, Solution
from services.core.solvers.solve import solve
from tests.support.exhaustive import exhaustive

SOLVERS = (Backend.HIGHS, Backend.CBC, Backend.GUROBI)


def gap_of(found: Solution) -> float:
    assert found.objective is not None
    assert found.bound is not None
    return (found.objective - found.bound) / max(abs(found.objective), 1e-9)


@st.composite
def small_models(draw: st.DrawFn, *, integer: bool = True) -> LinearModel:
    """A few whole, bounded variables with small whole coefficients: equations, ranges, one-sided and empty rows."""
    n, m = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    numbers = st.integers(-4, 4)
    lower = np.array(draw(st.lists(st.integers(-2, 1), min_size=n, max_size=n)), dtype=np.float64)
    spans = np.array(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)), dtype=np.float64)
    builder = ModelBuilder()
    x = builder.add_variables(
        n, lower=lower, upper=lower + spans, cost=draw(st.lists(numbers, min_size=n, max_size=n)), integer=integer
    )
    for _ in range(m):
        coefficients = draw(st.lists(numbers, min_size=n, max_size=n))
        low = draw(st.one_of(st.just(-np.inf), st.integers(-8, 6)))
        high = draw(st.one_of(st.just(np.inf), st.just(low) if np.isfinite(low) else st.nothing(), st.integers(-6, 8)))
        builder.add_rows(1, (0, x, coefficients), lower=low, upper=high)
    return builder.build(offset=draw(numbers))


def a_knapsack() -> LinearModel:
    builder = ModelBuilder()
    x = builder.add_variables(2, upper=1, cost=[-2, -3], integer=True)
    builder.add_rows(1, ([0, 0], x, [1, 1]), upper=1)
    return builder.build()


def hard_model(n: int = 400, m: int = 60) -> LinearModel:
    """A knapsack with many rows that no solver here proves within seconds."""
    generator = np.random.default_rng(0)
    weights = generator.uniform(0, 5, (m, n))
    builder = ModelBuilder()
    x = builder.add_variables(n, upper=10, cost=-generator.uniform(1, 10, n), integer=True)
    builder.add_rows(m, (np.repeat(np.arange(m), n), np.tile(x, m), weights.ravel()), upper=0.3 * weights.sum(axis=1))
    return builder.build()


@settings(max_examples=60, deadline=None)
@given(small_models())
def test_every_solver_finds_what_the_exhaustive_search_finds(model: LinearModel) -> None:
    truth = exhaustive(model)
    for backend in SOLVERS:
        found = solve(model, backend)
        assert (found.status, found.solver) == (truth.status, backend)
        if truth.objective is not None:
            assert found.objective == pytest.approx(truth.objective, abs=1e-6)
            assert found.bound is not None
            assert found.bound <= found.objective
            assert gap_of(found) <= 1e-5
            assert model.violation(found.values) <= 1e-6


@settings(max_examples=30, deadline=None)
@given(small_models(integer=False))
def test_linear_problems_have_one_optimum_whoever_solves_them(model: LinearModel) -> None:
    found = [solve(model, backend) for backend in SOLVERS]
    assert len({solution.status for solution in found}) == 1
    if found[0].objective is not None:
        assert [solution.objective for solution in found] == pytest.approx([found[0].objective] * 3, abs=1e-6)
        assert all(model.violation(solution.values) <= 1e-6 for solution in found)


@pytest.mark.parametrize("backend", SOLVERS)
def test_a_solve_stopped_by_its_limit_says_so_with_its_gap(backend: Backend) -> None:
    model = hard_model()
    first = np.zeros(400)
    first[0] = 1.0
    found = solve(model, backend, time_limit_s=1, start=first)  # so that there is one, however slow the machine is
    assert (found.status, found.solver) == (SolveStatus.FEASIBLE, backend)
    assert found.bound < found.objective <= model.costs @ first
    assert gap_of(found) > 0.001
    assert model.violation(found.values) <= 1e-5


@pytest.mark.parametrize("backend", SOLVERS)
def test_patience_accepts_a_good_solution_whatever_the_clock_says(backend: Backend) -> None:
    patience = Patience(checks=20, relative_gap=0.05)
    found, again = (solve(hard_model(100, 20), backend, time_limit_s=300, patience=patience) for _ in range(2))
    assert (found.status, found.solver) == (SolveStatus.FEASIBLE, backend)
    assert 0.001 < gap_of(found) <= 0.05
    assert found.checks >= 20
    assert found.objective == again.objective


@pytest.mark.parametrize("backend", SOLVERS)
def test_patience_takes_nothing_from_a_model_that_is_solved_within_it(backend: Backend) -> None:
    found = solve(a_knapsack(), backend, patience=Patience(checks=1_000, relative_gap=0.5))
    assert (found.status, found.objective) == (SolveStatus.OPTIMAL, solve(a_knapsack(), backend).objective)


@pytest.mark.parametrize("backend", [Backend.HIGHS, Backend.GUROBI])
def test_a_search_ends_where_nothing_below_the_cutoff_can_come_of_it(backend: Backend) -> None:
    model = hard_model()
    found = solve(model, backend, time_limit_s=300, cutoff=-1_140.0)
    assert found.status in (SolveStatus.FEASIBLE, SolveStatus.TIME_LIMIT)
    assert -1_140.0 <= found.bound < -1_120.0, "the optimum is not proven"


@pytest.mark.parametrize("backend", SOLVERS)
def test_a_search_begins_from_the_solution_it_is_given(backend: Backend) -> None:
    model = hard_model(100, 20)
    good = solve(model, Backend.HIGHS, relative_gap=0.02)
    found = solve(model, backend, relative_gap=0.05, start=good.values, patience=Patience(1, 0.05))
    assert found.objective <= good.objective + 1e-9


@pytest.mark.parametrize("backend", SOLVERS)
def test_a_solve_stopped_before_its_first_solution_has_none(backend: Backend) -> None:
    generator = np.random.default_rng(0)
    weights = generator.integers(10**6, 10**7, (3, 60)).astype(np.float64)
    builder = ModelBuilder()
    x = builder.add_variables(60, upper=1, cost=1, integer=True)
    half = np.floor(weights.sum(axis=1) / 2)
    builder.add_rows(3, (np.repeat(np.arange(3), 60), np.tile(x, 3), weights.ravel()), lower=half, upper=half)
    found = solve(builder.build(), backend, time_limit_s=0.5)
    assert (found.status, found.values, found.objective) == (SolveStatus.TIME_LIMIT, None, None)


@pytest.mark.parametrize("backend", SOLVERS)
@pytest.mark.parametrize("integer", [True, False])
def test_solutions_without_end_are_said_to_be_so(backend: Backend, integer: bool) -> None:
    builder = ModelBuilder()
    x = builder.add_variables(2, cost=-1, integer=integer)
    builder.add_rows(1, ([0, 0], x, [1, -1]), upper=3)
    assert solve(builder.build(), backend).status is SolveStatus.UNBOUNDED


@pytest.mark.parametrize("backend", list(Backend))
def test_crossed_and_empty_bounds_are_infeasible(backend: Backend) -> None:
    builder = ModelBuilder()
    builder.add_variables(1, lower=0.2, upper=0.8, integer=True)
    assert solve(builder.build(), backend).status is SolveStatus.INFEASIBLE
    builder = ModelBuilder()
    builder.add_variables(1, upper=1, integer=True)
    builder.add_rows(1, ([], [], []), lower=1)
    assert solve(builder.build(), backend).status is SolveStatus.INFEASIBLE


@pytest.mark.parametrize("backend", list(Backend))
def test_a_model_of_nothing_is_its_offset(backend: Backend) -> None:
    found = solve(ModelBuilder().build(offset=2), backend)
    assert (found.status, found.objective, found.bound) == (SolveStatus.OPTIMAL, 2, 2)


def test_gurobi_gives_way_to_highs_beyond_its_licence(capfd: pytest.CaptureFixture[str]) -> None:
    builder = ModelBuilder()
    x = builder.add_variables(2_500, upper=1, cost=-1, integer=True)
    builder.add_rows(1, (0, x, 1), upper=100)
    found = solve(builder.build(), Backend.GUROBI)
    if found.solver is Backend.GUROBI:
        pytest.skip("Gurobi has a full licence here")
    assert (found.status, found.solver, found.objective) == (SolveStatus.OPTIMAL, Backend.HIGHS, -100)
    assert "licence" in found.note
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("package", "backend", "note"),
    [
        ("gurobipy", Backend.GUROBI, "Gurobi is not installed (the extra `solvers`), so HiGHS solved it"),
        ("pulp", Backend.CBC, "the extra `solvers`"),
    ],
)
def test_a_missing_solver_is_said(monkeypatch: pytest.MonkeyPatch, package: str, backend: Backend, note: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    builder = ModelBuilder()
    builder.add_variables(1, lower=1, upper=2, cost=1)
    found = solve(builder.build(), backend)
    assert (found.solver, found.objective) == (Backend.HIGHS, 1)
    assert note in found.note


@pytest.mark.parametrize(
    ("upper", "cost", "floor", "status"),
    [
        (2.0, 1.0, 1.0, SolveStatus.OPTIMAL),
        (2.0, 1.0, 3.0, SolveStatus.INFEASIBLE),
        (np.inf, -1.0, 1.0, SolveStatus.UNBOUNDED),
    ],
)
def test_who_solved_it_instead_is_said_whatever_comes_out(
    monkeypatch: pytest.MonkeyPatch, upper: float, cost: float, floor: float, status: SolveStatus
) -> None:
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    builder = ModelBuilder()
    x = builder.add_variables(2, upper=upper, cost=cost)
    builder.add_rows(1, ([0, 0], x, [1, -1]), lower=floor)
    found = solve(builder.build(), Backend.GUROBI)
    assert (found.status, found.solver) == (status, Backend.HIGHS)
    assert found.note.startswith("Gurobi is not installed")


@pytest.mark.parametrize(("backend", "module"), [(Backend.GUROBI, "gurobipy"), (Backend.CBC, "pulp")])
def test_who_stands_in_gets_the_limits_and_the_start(
    backend: Backend, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_on: list[object] = []
    real = highs.solve

    def solving(*how: Any) -> Solution:
        handed_on.extend(how)
        return real(*how)

    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(highs, "solve", solving)
    model, start = a_knapsack(), np.array([1.0, 0.0])

    patience = Patience(9, 0.5)
    solve(model, backend, time_limit_s=7, relative_gap=0.25, start=start, patience=patience, cutoff=-9.0)

    assert handed_on[0] is model
    assert vars(handed_on[1]) == {
        "time_limit_s": 7,
        "relative_gap": 0.25,
        "start": start,
        "patience": patience,
        "cutoff": -9.0,
    }


@pytest.mark.parametrize("backend", SOLVERS)
def test_a_solver_prints_nothing(backend: Backend, capfd: pytest.CaptureFixture[str]) -> None:
    assert solve(hard_model(), backend, relative_gap=0.5).status is SolveStatus.OPTIMAL
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("backend", SOLVERS)
def test_a_wider_gap_is_enough(backend: Backend) -> None:
    found = solve(hard_model(), backend, relative_gap=0.5)
    assert found.status is SolveStatus.OPTIMAL
    assert 0 < gap_of(found) <= 0.5 + 1e-9


def test_the_status_of_a_solve_is_written_as_users_read_it() -> None:
    written = {"optimal", "feasible", "infeasible", "unbounded", "time_limit", "failed"}
    assert {status.value for status in SolveStatus} == written
    assert {backend.value for backend in Backend} == {"highs", "cbc", "gurobi"}


def test_a_relaxed_model_allows_fractions_and_is_otherwise_the_same() -> None:
    builder = ModelBuilder()
    x = builder.add_variables(2, upper=1, cost=[-2, -3], integer=True)
    builder.add_rows(1, ([0, 0], x, [2, 2]), upper=3)
    model = builder.build()

    assert solve(model).objective == -3
    assert solve(model.relaxed()).objective == pytest.approx(-4)
    assert model.integer.all()


def test_rows_sum_what_is_added_twice() -> None:
    builder = ModelBuilder()
    x = builder.add_variables(2, cost=-1)
    builder.add_rows(1, ([0, 0, 0], [x[0], x[0], x[1]], [1, 1, 1]), upper=4)
    model = builder.build()
    assert (model.columns.tolist(), model.coefficients.tolist(), model.starts.tolist()) == ([0, 1], [2, 1], [0, 2])


def test_broken_models_and_limits_are_refused() -> None:
    builder = ModelBuilder()
    builder.add_variables(1)
    with pytest.raises(DomainError, match="row that was not added"):
        builder.add_rows(1, ([1], [0], 1))
    with pytest.raises(DomainError, match="whole, bounded"):
        exhaustive(builder.build())
    for limits in ({"time_limit_s": 0}, {"relative_gap": -1}, {"relative_gap": float("nan")}):
        with pytest.raises(DomainError):
            solve(builder.build(), **limits)
    with pytest.raises(DomainError, match="no solver called"):
        solve(builder.build(), "abacus")
    for start in ([1.0, 1.0], [float("nan")]):
        with pytest.raises(DomainError, match="one finite value for each variable"):
            solve(builder.build(), start=np.array(start))
    with pytest.raises(DomainError, match="must be finite"):
        replace(builder.build(), offset=float("inf"))
    builder.add_rows(1, ([0], [1], 1))
    with pytest.raises(DomainError, match="not there"):
        builder.build()


def test_who_waits_is_told_how_far_it_is_and_what_the_best_is() -> None:
    told: list[Progress] = []

    found = solve(hard_model(), time_limit_s=1, report=told.append)

    shares = [each.share for each in told]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 1
    bests = [each.best for each in told if each.best is not None]
    assert bests == sorted(bests, reverse=True)
    assert bests[-1] == pytest.approx(found.objective)
    assert "gap" in told[-1].doing


def test_a_model_without_whole_numbers_tells_its_iterations() -> None:
    told: list[Progress] = []

    found = solve(hard_model().relaxed(), time_limit_s=60, report=told.append)

    assert found.status is SolveStatus.OPTIMAL
    assert told
    assert all(each.doing.endswith("iterations") and each.best is None for each in told)
    assert 0 <= told[0].share <= told[-1].share < 1
