"""A linear model with integer variables, and its solution.

The model consists of arrays, so that a hundred thousand variables are made and passed on without a Python object for
each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.solving import Backend, SolveStatus

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class LinearModel:
    """Minimise ``costs @ x + offset``, ``row_lower <= A @ x <= row_upper``, ``lower <= x <= upper``.

    Row ``i`` of ``A`` has ``coefficients[starts[i]:starts[i+1]]`` in the columns ``columns[starts[i]:starts[i+1]]``,
    each column at most once. Bounds may be infinite. To maximise, negate the costs.
    """

    costs: Floats  #: (n,), as the next two
    lower: Floats
    upper: Floats
    integer: Bools  #: (n,) whether the variable takes whole numbers only
    row_lower: Floats  #: (m,), as the next
    row_upper: Floats
    starts: Ints  #: (m + 1,)
    columns: Ints  #: (entries,), as the next
    coefficients: Floats
    offset: float = 0.0  #: Added to the objective

    def __post_init__(self) -> None:
        n, m = self.costs.size, self.row_lower.size
        if not self.lower.size == self.upper.size == self.integer.size == n or self.row_upper.size != m:
            raise DomainError("a model needs bounds and a kind for each variable, and two bounds for each row")
        if self.starts.size != m + 1 or not self.starts[-1] == self.columns.size == self.coefficients.size:
            raise DomainError("the rows of a model do not cover its coefficients")
        if self.columns.size and not 0 <= self.columns.min() <= self.columns.max() < n:
            raise DomainError("a row of a model names a variable that is not there")
        if not (np.isfinite(self.costs).all() and np.isfinite(self.coefficients).all() and np.isfinite(self.offset)):
            raise DomainError("the costs and coefficients of a model must be finite")
        if any(np.isnan(bounds).any() for bounds in (self.lower, self.upper, self.row_lower, self.row_upper)):
            raise DomainError("a bound of a model is not a number")

    @property
    def variables(self) -> int:
        """The number of variables."""
        return self.costs.size

    @property
    def rows(self) -> int:
        """The number of constraints."""
        return self.row_lower.size

    @property
    def row_of_entry(self) -> Ints:
        """(entries,) the row of each coefficient."""
        return np.repeat(np.arange(self.rows, dtype=np.int64), np.diff(self.starts))

    def relaxed(self) -> LinearModel:
        """Return the model with fractional values allowed everywhere."""
        return replace(self, integer=np.zeros_like(self.integer))

    def objective(self, values: Floats) -> float:
        """Return the objective at ``values`` (n,)."""
        return float(self.costs @ values) + self.offset

    def violation(self, values: Floats) -> float:
        """Return the largest violation of a bound, row or integrality by ``values`` (n,); 0 if there is none."""
        activity = np.bincount(self.row_of_entry, self.coefficients * values[self.columns], minlength=self.rows)
        fractions = np.abs(values - np.round(values))[self.integer]
        excesses = (self.lower - values, values - self.upper, self.row_lower - activity, activity - self.row_upper)
        return max(0.0, *(float(part.max(initial=0.0)) for part in (*excesses, fractions)))


@dataclass
class ModelBuilder:
    """Collects variables and constraints, a block at a time."""

    _costs: list[Floats] = field(default_factory=list[Floats])
    _lower: list[Floats] = field(default_factory=list[Floats])
    _upper: list[Floats] = field(default_factory=list[Floats])
    _integer: list[Bools] = field(default_factory=list[Bools])
    _row_lower: list[Floats] = field(default_factory=list[Floats])
    _row_upper: list[Floats] = field(default_factory=list[Floats])
    _entries: list[tuple[Ints, Ints, Floats]] = field(default_factory=list[tuple[Ints, Ints, Floats]])
    _variables: int = 0
    _rows: int = 0

    def add_variables(
        self,
        count: int,
        *,
        lower: ArrayLike = 0.0,
        upper: ArrayLike = np.inf,
        cost: ArrayLike = 0.0,
        integer: ArrayLike = False,
    ) -> Ints:
        """Add ``count`` variables and return their columns; each argument is one value or one per variable."""
        whole = _spread(integer, count).astype(np.bool_)
        low, high = _spread(lower, count), _spread(upper, count)
        self._lower.append(np.where(whole, np.ceil(low), low))
        self._upper.append(np.where(whole, np.floor(high), high))
        self._integer.append(whole)
        self._costs.append(_spread(cost, count))
        self._variables += count
        return np.arange(self._variables - count, self._variables, dtype=np.int64)

    def add_rows(
        self,
        count: int,
        *terms: tuple[ArrayLike, ArrayLike, ArrayLike],
        lower: ArrayLike = -np.inf,
        upper: ArrayLike = np.inf,
    ) -> None:
        """Add ``count`` constraints.

        Args:
            terms: The rows, 0 being the first of the new ones, the variables and their coefficients: (entries,), or one
                value for all. Those of one row and variable are summed.
            lower, upper: One value or one per new row; equal for an equation.
        """
        for rows, columns, coefficients in terms:
            there = np.asarray(columns, dtype=np.int64)
            rows_there = np.broadcast_to(np.asarray(rows, dtype=np.int64), there.shape)
            if there.size and not 0 <= rows_there.min() <= rows_there.max() < count:
                raise DomainError("a coefficient stands in a row that was not added")
            self._entries.append((rows_there + self._rows, there, _spread(coefficients, there.size)))
        self._row_lower.append(_spread(lower, count))
        self._row_upper.append(_spread(upper, count))
        self._rows += count

    def build(self, offset: float = 0.0) -> LinearModel:
        """Return the model, with ``offset`` added to its objective."""
        rows = _join([entry[0] for entry in self._entries], np.int64)
        columns = _join([entry[1] for entry in self._entries], np.int64)
        coefficients = _join([entry[2] for entry in self._entries], np.float64)
        if columns.size and not 0 <= columns.min() <= columns.max() < self._variables:
            raise DomainError("a row of a model names a variable that is not there")
        places, entry_of = np.unique(rows * max(self._variables, 1) + columns, return_inverse=True)
        summed = np.bincount(entry_of, coefficients, minlength=places.size)
        per_row = np.bincount(places // max(self._variables, 1), minlength=self._rows)
        return LinearModel(
            costs=_join(self._costs, np.float64),
            lower=_join(self._lower, np.float64),
            upper=_join(self._upper, np.float64),
            integer=_join(self._integer, np.bool_),
            row_lower=_join(self._row_lower, np.float64),
            row_upper=_join(self._row_upper, np.float64),
            starts=np.concatenate([[0], np.cumsum(per_row)]).astype(np.int64),
            columns=places % max(self._variables, 1),
            coefficients=summed.astype(np.float64),
            offset=offset,
        )


CHECKS_A_WORK_UNIT = 2_000  #: Both are about a second of one core


@dataclass(frozen=True)
class Patience:
    """When to accept a solution that is not yet proven optimal, in the solver's own measure of its work.

    None of these measures depends on how busy the machine is: two runs end at the same point of the search.
    """

    checks: int
    """How much work to do first: for HiGHS, how often it asks whether to stop; for CBC, the number of nodes; for
    Gurobi, one work unit for every ``CHECKS_A_WORK_UNIT``."""
    relative_gap: float  #: From then on, a solution this close to the bound is accepted; > 0


@dataclass(frozen=True)
class Limits:
    """How far a backend goes with a model; as for ``solve.solve``."""

    time_limit_s: float | None
    relative_gap: float
    start: Floats | None = None
    patience: Patience | None = None
    cutoff: float | None = None


class AwayError(Exception):
    """A solver is not there, or may not take the model: HiGHS solves it, with this message as its note."""


@dataclass(frozen=True)
class Solution:
    """The result of a solve."""

    status: SolveStatus  #: How it ended
    solver: Backend  #: The solver that gave the result
    values: Floats | None = None
    """(n,) the best solution found, with integer variables exactly whole; None if there is none."""
    objective: float | None = None
    """At ``values``, computed from the model, so that it means the same for every solver."""
    bound: float | None = None  #: No solution is better, as far as the solver has proven; None if it has proven nothing
    note: str = ""  #: What a reader should know: that another solver stepped in, or how it failed
    solver_s: float = 0.0  #: How long the solver took, by its own clock
    reduced_costs: Floats | None = None
    """(n,) of an optimum without integer variables, from HiGHS: how much a unit of an unused variable worsens it."""
    checks: int = 0
    """Work as ``Patience`` counts it; for CBC, which does not report it, that of a patience that ran out."""


def solution_of(
    model: LinearModel,
    status: SolveStatus,
    solver: Backend,
    *,
    values: ArrayLike | None = None,
    bound: float | None = None,
    note: str = "",
) -> Solution:
    """Return a backend's answer with integer variables made exactly whole and the objective recomputed."""
    bound = None if bound is None or not np.isfinite(bound) else float(bound)
    if values is None:
        return Solution(status, solver, bound=bound, note=note)
    found = np.clip(np.asarray(values, dtype=np.float64), model.lower, model.upper)
    found[model.integer] = np.round(found[model.integer])
    objective = model.objective(found)
    if bound is not None:
        bound = min(bound, objective)
    return Solution(status, solver, values=found, objective=objective, bound=bound, note=note)


def _spread(value: ArrayLike, count: int) -> Floats:
    return np.array(np.broadcast_to(np.asarray(value, dtype=np.float64), (count,)))


def _join(parts: list[NDArray[T]], dtype: type[T]) -> NDArray[T]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
