"""The prior of a job before its first point: its board, and the family of its model.

It gives only orders of magnitude and shapes: a job's first points set its scale, and the prior then says how the rest
would go. Boards are those of ``services.core.profiles.boards``. For families, seconds per sample and shape were set by
hand from what Zeus' and Sia's tables show of their models; nothing in the repository fits them.
"""

from dataclasses import astuple, dataclass

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.profiles.boards import Board, board_of
from services.core.profiles.throughput import EnergyParameters, ThroughputParameters

VOLTAGE_RISE = 1.3
"""Voltage at the top clock against that at ``f0``: our reading, which puts the best clock near ``f0``."""
REST = 0.5  #: Share of a step's draw at its usual batch that the batch does not change


@dataclass(frozen=True)
class Family:
    """A kind of model."""

    sample_s: float  #: Seconds per sample on a V100 at the top clock and the usual batch
    batch: float  #: The usual batch per GPU
    floor: float  #: Share of a step that does not depend on the batch
    clocked: float  #: Share of the rest that depends on the clock
    sync_local: float  #: Synchronisation on one node, as a share of a step on one GPU
    sync_node: float  #: The same between nodes
    demand: float  #: Draw at the usual batch, as a share of the way from idle to the limit


FAMILIES = {
    "vision": Family(3e-3, 64.0, 0.2, 0.7, 0.1, 0.5, 0.8),
    "language": Family(2e-2, 16.0, 0.2, 0.7, 0.2, 1.5, 0.9),
    "speech": Family(5e-2, 16.0, 0.3, 0.6, 0.1, 0.5, 0.6),
    "recommendation": Family(1e-5, 1_024.0, 0.6, 0.4, 0.2, 1.0, 0.2),
}
ANY_FAMILY = "any"
"""For a job that does not say what it trains: the geometric means of all families."""
FAMILIES[ANY_FAMILY] = Family(*np.exp(np.mean(np.log([astuple(each) for each in FAMILIES.values()]), axis=0)).tolist())


def family_of(name: str) -> Family:
    """Return a family by name; ``DomainError`` if there is no family of that name."""
    if name not in FAMILIES:
        raise DomainError(f"unknown family of models {name!r}; known: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def usual_w(gpu_model: str, family: str = ANY_FAMILY) -> float:
    """Return what a GPU draws as is usual for its model, at work for a family of models, watts."""
    board = board_of(gpu_model)
    return board.idle_w + family_of(family).demand * (board.peak_w - board.idle_w)


def believed_speed(board: Board, family: Family, *, top: float) -> ThroughputParameters:
    """Return the prior of the times; ``top`` is the value of the control at full speed (MHz, or 1 for shares)."""
    step_s = family.sample_s * family.batch / board.speed
    sample_s = (1.0 - family.floor) * step_s / family.batch
    local, node = family.sync_local * step_s, family.sync_node * step_s
    return ThroughputParameters(
        alpha_io=0.0,
        beta_io=0.05 * sample_s,
        alpha_grad=family.floor * step_s,
        beta_grad=(1.0 - family.clocked) * sample_s,
        kappa_grad=family.clocked * sample_s * top,
        alpha_sync_local=0.3 * local * top,
        kappa_sync_local=0.0,
        beta_sync_local=0.02 * local,
        theta_sync_local=0.7 * local,
        alpha_sync_node=0.1 * node * top,
        kappa_sync_node=0.0,
        beta_sync_node=0.005 * node,
        theta_sync_node=0.9 * node,
        gamma1=3.0,
        gamma2=1.5,
    )


def believed_draw(board: Board, family: Family) -> EnergyParameters:
    """Return the prior of the energy parameters, by clock: linear below ``f0``, cubic above, meeting there."""
    f0, top = board.break_mhz, board.top_mhz
    dynamic_w = family.demand * (board.peak_w - board.idle_w * top / f0)
    below_w = dynamic_w * (f0 / top) / VOLTAGE_RISE**2
    cubic = (dynamic_w - below_w * top / f0) / (top**3 - f0**2 * top)
    linear = below_w / f0 - cubic * f0**2
    slope = (1.0 - REST) / float(np.log(family.batch + 2.0))
    return EnergyParameters(
        a_lg=below_w / f0,
        b_lg=0.0,
        alpha_lg=slope,
        theta_lg=2.0,
        beta_lg=REST,
        a_hg=cubic,
        b_hg=0.0,
        c_hg=linear,
        d_hg=0.0,
        alpha_hg=slope,
        theta_hg=2.0,
        beta_hg=REST,
        a_ls=0.5 * below_w / f0,
        b_ls=0.0,
        a_hs=0.5 * cubic,
        b_hs=0.0,
        c_hs=0.5 * linear,
        d_hs=0.0,
        static_l_w=board.idle_w,
        c_h=board.idle_w / f0,
        f0_mhz=f0,
    )


def believed_capped(board: Board, family: Family) -> Floats:
    """Return the prior of the (21,) parameters of a job under power limits."""
    dynamic_w = family.demand * (board.peak_w - board.idle_w)
    alpha_w = (1.0 - REST) * dynamic_w / float(np.log(family.batch + 2.0))
    own = board.idle_w, alpha_w, 2.0, REST * dynamic_w, 0.5 * dynamic_w, 1.2  # in the order of ``CappedParameters``
    return np.array([*believed_speed(board, family, top=1.0), *own])
