"""PowerFlow's energy model: what each part of a step draws, below and above the board's breaking point ``f0``.

Below ``f0`` a board holds its voltage, so dynamic power rises with the clock and static power does not; above it the
voltage also rises with the clock. ``clock_mhz`` may be a power limit in W, as in ``throughput``.
"""

from typing import Any, NamedTuple

import numpy as np

from services.core.profiles.throughput import Times


class EnergyParameters(NamedTuple):
    """The learnable parameters of equations 12 to 15, numbers or arrays; all >= 0, both ``theta`` >= 1.

    ``a`` to ``d`` are coefficients of powers of the clock in MHz, giving W; ``l`` means below ``f0_mhz``, ``h`` above,
    ``g`` gradients, ``s`` synchronisation. ``alpha``, ``theta`` and ``beta`` shape how power grows with the batch.
    """

    a_lg: Any
    b_lg: Any
    alpha_lg: Any
    theta_lg: Any
    beta_lg: Any
    a_hg: Any
    b_hg: Any
    c_hg: Any
    d_hg: Any
    alpha_hg: Any
    theta_hg: Any
    beta_hg: Any
    a_ls: Any
    b_ls: Any
    a_hs: Any
    b_hs: Any
    c_hs: Any
    d_hs: Any
    static_l_w: Any
    c_h: Any
    f0_mhz: Any


class Powers(NamedTuple):
    """What one GPU draws in a step, W: while it computes gradients, while it synchronises, and throughout."""

    grad_w: Any
    sync_w: Any
    static_w: Any


def powers(p: EnergyParameters, local_batch: Any, clock_mhz: Any) -> Powers:
    """Return the three powers of one GPU.

    Equation 12 is read as ``kappa * (alpha * log(bs + theta) + beta)``. The printed pieces are fitted separately and
    may jump down at ``f0``, which no board does: *our reading* is that power above ``f0`` is never less than at ``f0``
    (``tests/unit/core/profiles/test_models.py::test_power_does_not_fall_at_the_breaking_point``).

    Source: PowerFlow, equations 12 to 15.
    """
    below = np.minimum(clock_mhz, p.f0_mhz)
    f = clock_mhz
    low_g = (p.a_lg * below + p.b_lg) * (p.alpha_lg * np.log(local_batch + p.theta_lg) + p.beta_lg)
    high_g = (((p.a_hg * f + p.b_hg) * f + p.c_hg) * f + p.d_hg) * (
        p.alpha_hg * np.log(local_batch + p.theta_hg) + p.beta_hg
    )
    low_s = p.a_ls * below + p.b_ls
    high_s = ((p.a_hs * f + p.b_hs) * f + p.c_hs) * f + p.d_hs
    low = f < p.f0_mhz
    return Powers(
        np.where(low, low_g, np.maximum(low_g, high_g)),
        np.where(low, low_s, np.maximum(low_s, high_s)),
        np.where(low, p.static_l_w, np.maximum(p.static_l_w, p.c_h * f)),
    )


def energy_j(p: EnergyParameters, step: Times, gpus: Any, local_batch: Any, clock_mhz: Any) -> Any:
    """Return the energy of all the gang's GPUs in one step, J.

    Source: PowerFlow, equations 6 to 9.
    """
    drawn = powers(p, local_batch, clock_mhz)
    return gpus * (drawn.grad_w * step.grad_s + drawn.sync_w * step.sync_s + drawn.static_w * step.iter_s)
