"""Jobs whose performance is known: planted parameters, and points measured of them."""

from __future__ import annotations

import numpy as np

from services.core.domain.arrays import Floats
from services.core.profiles.observations import Observations
from services.core.profiles.throughput import EnergyParameters, ThroughputParameters, energy_j, times

CLOCKS_MHZ = tuple(range(510, 1_531, 102))
SPEED = ThroughputParameters(
    alpha_io=0.01,
    beta_io=2e-4,
    alpha_grad=0.005,
    beta_grad=3e-4,
    kappa_grad=1.8,
    alpha_sync_local=8.0,
    kappa_sync_local=0.5,
    beta_sync_local=5e-4,
    theta_sync_local=0.004,
    alpha_sync_node=20.0,
    kappa_sync_node=1.5,
    beta_sync_node=0.002,
    theta_sync_node=0.02,
    gamma1=2.5,
    gamma2=1.8,
)
DRAW = EnergyParameters(
    a_lg=0.06,
    b_lg=20.0,
    alpha_lg=0.2,
    theta_lg=4.0,
    beta_lg=0.3,
    a_hg=6e-8,
    b_hg=1e-5,
    c_hg=0.02,
    d_hg=10.0,
    alpha_hg=0.2,
    theta_hg=4.0,
    beta_hg=0.3,
    a_ls=0.03,
    b_ls=15.0,
    a_hs=2e-8,
    b_hs=1e-5,
    c_hs=0.01,
    d_hs=10.0,
    static_l_w=45.0,
    c_h=0.055,
    f0_mhz=900.0,
)


def grid(
    gpus: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
    batches: tuple[int, ...] = (16, 32, 64, 128),
    clocks: tuple[int, ...] = CLOCKS_MHZ,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return gpus, local batch, clock and nodes of every combination, (n,) each; eight GPUs to a node."""
    rows = [(n, batch, clock, max(1, n // 8)) for n in gpus for batch in batches for clock in clocks]
    found = np.array(rows, dtype=np.float64).T
    return found[0], found[1], found[2], found[3]


def measured(
    where: tuple[Floats, Floats, Floats, Floats],
    *,
    speed: ThroughputParameters = SPEED,
    draw: EnergyParameters | None = DRAW,
    noise: float = 0.0,
    seed: int = 0,
) -> Observations:
    """Return points of a planted job, with so much relative noise."""
    rng = np.random.default_rng(seed)
    gpus, batch, clock, nodes = where
    step = times(speed, gpus, batch, clock, nodes)
    time_s = step.iter_s * np.exp(noise * rng.standard_normal(len(gpus)))
    energy = None
    if draw is not None:
        energy = energy_j(draw, step, gpus, batch, clock) * np.exp(noise * rng.standard_normal(len(gpus)))
    return Observations.of(
        time_s, gpus=gpus, local_batch=batch, control=clock, nodes=nodes, energy_j_per_iteration=energy
    )
