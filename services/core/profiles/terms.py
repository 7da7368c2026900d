"""Which parameters the points determine, the natural size of each, and starting points for the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from services.core.domain.arrays import Bools, Floats
from services.core.profiles.fitting import non_negative
from services.core.profiles.observations import COLUMN_OF, Observations
from services.core.profiles.throughput import MAX_OVERLAP, EnergyParameters, ThroughputParameters, Times

SPEED = ThroughputParameters._fields
DRAW = EnergyParameters._fields
LOW = ("a_lg", "b_lg", "alpha_lg", "theta_lg", "beta_lg", "a_ls", "b_ls", "static_l_w")
HIGH = ("a_hg", "b_hg", "c_hg", "d_hg", "alpha_hg", "theta_hg", "beta_hg", "a_hs", "b_hs", "c_hs", "d_hs", "c_h")


@dataclass(frozen=True)
class Terms:
    """Which parameters are fitted."""

    free: Bools  #: (p,)
    at: Floats  #: (p,) values at which those that are not fitted are held; NaN to leave them as in the start
    fixed: Mapping[str, str]  #: For each parameter that is not fitted, why

    def hold(self, starts: Floats) -> Floats:
        """Return starts, (s, p), with the parameters that are not fitted set to their fixed values."""
        held = ~self.free & ~np.isnan(self.at)
        return np.where(held, self.at, starts)

    def broken_at(self, f0: float, of: Observations) -> Terms:
        """Return the terms of an energy model with this breaking point; a side without points is not fitted."""
        free = self.free.copy()
        for names, seen in ((LOW, (of.control < f0).any()), (HIGH, (of.control >= f0).any())):
            if not seen:
                free[[DRAW.index(name) for name in names]] = False
        return replace(self, free=free)


def throughput_terms(of: Observations, *, believed: Floats | None = None) -> Terms:
    """Return which of the 15 parameters these points determine; the others are held at their prior, or at zero."""
    several, local = of.gpus >= 2, (of.gpus >= 2) & (of.nodes < 2)
    node = several & (of.nodes >= 2)
    fixed: dict[str, str] = {}
    clock = _unvaried(of, COLUMN_OF[of.axis], of.control)
    batch = _unvaried(of, "local_batch", of.local_batch)
    if clock:
        fixed |= dict.fromkeys(("kappa_grad", "alpha_sync_local", "kappa_sync_local"), clock)
        fixed |= dict.fromkeys(("alpha_sync_node", "kappa_sync_node"), clock)
    if batch:
        fixed |= dict.fromkeys(("beta_io", "beta_grad"), batch)
    if batch and clock and not several.any():
        fixed["gamma1"] = "nothing tells the parts of a step apart"
    for name, rows, none in (
        ("local", local, "no point has several GPUs on one node"),
        ("node", node, "no point is on several nodes"),
    ):
        own = [f"{term}_sync_{name}" for term in ("alpha", "kappa", "beta", "theta")]
        if not rows.any():
            missing = "gpus is absent" if "gpus" in of.absent else "nodes is absent" if "nodes" in of.absent else ""
            fixed |= dict.fromkeys(own, missing or none)
        elif len(np.unique(of.gpus[rows])) < 2:
            fixed |= dict.fromkeys(own[1:3], f"all points of the {name} case have {of.gpus[rows][0]:g} GPUs")
    if not several.any():
        fixed["gamma2"] = "no point has several GPUs"
    at = [1.0 if name.startswith("gamma") else 0.0 for name in SPEED]
    return _terms(SPEED, fixed, at, believed)


def energy_terms(of: Observations, *, believed: Floats | None = None) -> Terms:
    """Return which of the 21 parameters these points determine; the breaking point is searched for separately."""
    fixed: dict[str, str] = {"f0_mhz": "found by trying"}
    at = dict.fromkeys(DRAW, 0.0) | {"beta_lg": 1.0, "beta_hg": 1.0, "theta_lg": 1.0, "theta_hg": 1.0}
    at["f0_mhz"] = np.nan
    clock = _unvaried(of, COLUMN_OF[of.axis], of.control)
    batch = _unvaried(of, "local_batch", of.local_batch)
    if clock:
        fixed |= dict.fromkeys(("a_lg", "a_ls", *HIGH), clock)
        fixed["f0_mhz"] = clock
    if batch:
        fixed |= dict.fromkeys(("alpha_lg", "theta_lg", "alpha_hg", "theta_hg", "beta_lg", "beta_hg"), batch)
    if not (of.gpus >= 2).any():
        reason = "gpus is absent" if "gpus" in of.absent else "no point has several GPUs"
        fixed |= dict.fromkeys(("a_ls", "b_ls", "a_hs", "b_hs", "c_hs", "d_hs"), reason)
    if believed is not None:
        believed = np.append(believed[:-1], np.nan)
    return _terms(DRAW, fixed, [at[name] for name in DRAW], believed)


def throughput_bounds() -> tuple[Floats, Floats]:
    """Return lower and upper bounds, (15,) each."""
    low = np.array([1.0 if name.startswith("gamma") else 0.0 for name in SPEED])
    return low, np.where(low > 0, MAX_OVERLAP, np.inf)


def energy_bounds() -> tuple[Floats, Floats]:
    """Return lower and upper bounds, (21,) each."""
    low = np.array([1.0 if name.startswith("theta") else 0.0 for name in DRAW])
    return low, np.where(low > 0, 1e6, np.inf)


def throughput_units(of: Observations) -> Floats:
    """Return each parameter's natural size, (15,): the value that makes its term as long as a typical step."""
    time_s, batch = float(np.median(of.seconds_per_iteration)), float(np.median(of.local_batch))
    clock, more = float(np.median(of.control)), max(float(of.gpus.max()) - 2, 1.0)
    size = {
        "alpha_io": time_s,
        "beta_io": time_s / (batch * float(np.median(of.gpus / of.nodes))),
        "alpha_grad": time_s,
        "beta_grad": time_s / batch,
        "kappa_grad": time_s * clock / batch,
        "gamma1": 1.0,
        "gamma2": 1.0,
    }
    for case in ("local", "node"):
        size[f"alpha_sync_{case}"] = time_s * clock
        size[f"kappa_sync_{case}"] = time_s * clock / more
        size[f"beta_sync_{case}"] = time_s / more
        size[f"theta_sync_{case}"] = time_s
    return np.array([size[name] for name in SPEED])


def energy_units(of: Observations) -> Floats:
    """Return each parameter's natural size, (21,): the value that makes its term draw as much as a typical board."""
    power_w, f = float(np.median(of.power_w)), float(np.median(of.control))
    degree = {"a_l": 1, "b_l": 0, "a_h": 3, "b_h": 2, "c_h": 1, "d_h": 0}
    size = {name: power_w / f ** degree[name[:3]] for name in DRAW if name[:3] in degree}
    size |= {"static_l_w": power_w, "f0_mhz": f}
    size |= {f"theta_{side}g": float(np.median(of.local_batch)) for side in "lh"}
    size |= {f"{name}_{side}g": 1.0 for name in ("alpha", "beta") for side in "lh"}
    return np.array([size[name] for name in DRAW])


def throughput_starts(of: Observations, terms: Terms) -> Floats:
    """Return three starts, (3, 15): parts that add up, parts that overlap over a floor, and a floor of reading alone.

    Where nothing overlaps the model is linear in its parameters, and non-negative least squares solves it directly.
    A little of everything is added, because a term at zero has no slope by which to leave it once parts overlap.
    """
    units = throughput_units(of)
    plain = len(SPEED) - 2
    gpus, batch, f = of.gpus, of.local_batch, of.control
    several, more = gpus >= 2, gpus - 2
    columns = [np.ones(len(of)), batch * gpus / of.nodes, np.ones(len(of)), batch, batch / f]
    for rows in (several & (of.nodes < 2), several & (of.nodes >= 2)):
        columns += [rows / f, rows * more / f, rows * more, rows * 1.0]
    basis = np.column_stack(columns) * terms.free[:plain] * units[:plain]
    linear = non_negative(basis, of.seconds_per_iteration) + 0.03
    added = np.append(linear * units[:plain], [1.3, 1.3])
    floor = added.copy()
    floor[0] = 0.8 * float(of.seconds_per_iteration.min())
    floor[-2:] = 4.0
    reading = floor.copy()
    reading[SPEED.index("alpha_grad")] = 0.03 * units[SPEED.index("alpha_grad")]
    reading[-2:] = 2.0
    return np.array([added, floor, reading])


def energy_starts(of: Observations, step: Times, f0: float) -> Floats:
    """Return a start, (1, 21), for a breaking point: solved directly with the batch's part held at 1."""
    units = energy_units(of)
    f, low = of.control, of.control < f0
    grad, sync, total = (of.gpus * part for part in (step.grad_s, step.sync_s, step.iter_s))
    column = {
        "a_lg": low * grad * f,
        "b_lg": low * grad,
        "a_hg": ~low * grad * f**3,
        "b_hg": ~low * grad * f**2,
        "c_hg": ~low * grad * f,
        "d_hg": ~low * grad,
        "a_ls": low * sync * f,
        "b_ls": low * sync,
        "a_hs": ~low * sync * f**3,
        "b_hs": ~low * sync * f**2,
        "c_hs": ~low * sync * f,
        "d_hs": ~low * sync,
        "static_l_w": low * total,
        "c_h": ~low * total * f,
    }
    at = [DRAW.index(name) for name in column]
    linear = non_negative(np.column_stack(list(column.values())) * units[at], of.energy_j_per_iteration) + 0.02
    start = np.zeros(len(DRAW))
    start[at] = linear * units[at]
    typical = float(np.log(np.median(of.local_batch) + 2.0))
    for side in "lh":
        for name, value in (("alpha", 0.5 / typical), ("theta", 2.0), ("beta", 0.5)):
            start[DRAW.index(f"{name}_{side}g")] = value
    return start[None]


def _unvaried(of: Observations, name: str, column: Floats) -> str:
    """Return why a column determines nothing; empty if it does determine something."""
    if name in of.absent:
        return f"{name} is absent"
    return "" if len(np.unique(column)) > 1 else f"{name} is {column[0]:g} in all points"


def _terms(names: tuple[str, ...], fixed: Mapping[str, str], at: list[float], believed: Floats | None) -> Terms:
    free = np.array([name not in fixed for name in names])
    held = np.array(at) if believed is None else believed
    return Terms(free, held, {name: fixed[name] for name in names if name in fixed})
