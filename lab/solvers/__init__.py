"""Solvers of linear models beside HiGHS, to compare it with: CBC by PuLP, and Gurobi where its licence suffices."""

from __future__ import annotations

from lab.solvers import cbc, gurobi
from services.core.domain.solving import Backend
from services.core.solvers.solve import Solver

SOLVERS: dict[Backend, Solver] = {Backend.CBC: cbc.solve, Backend.GUROBI: gurobi.solve}
