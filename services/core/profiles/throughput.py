"""PowerFlow's models of throughput and energy: what a step's time is made of, and what each part draws.

Every function takes numbers or arrays that broadcast against each other, so that the same code serves one job at one
configuration and ten thousand jobs over a grid. ``clock_mhz`` may be a power limit in W: the form is the same.
"""

from typing import Any, NamedTuple

import numpy as np

MAX_OVERLAP = 10.0
"""Upper bound of both gammas: two equal parts then take 7 % longer than one of them, near enough to full overlap."""


class ThroughputParameters(NamedTuple):
    """The fittable parameters of equations 2 to 5, numbers or arrays; all >= 0, both gammas >= 1.

    Times in s; ``kappa_grad`` in s MHz per sample, the ``alpha`` and ``kappa`` of synchronisation in s MHz.
    """

    alpha_io: Any
    beta_io: Any
    alpha_grad: Any
    beta_grad: Any
    kappa_grad: Any
    alpha_sync_local: Any
    kappa_sync_local: Any
    beta_sync_local: Any
    theta_sync_local: Any
    alpha_sync_node: Any
    kappa_sync_node: Any
    beta_sync_node: Any
    theta_sync_node: Any
    gamma1: Any
    gamma2: Any


class Times(NamedTuple):
    """The parts of a step and the step itself, seconds."""

    io_s: Any
    grad_s: Any
    sync_s: Any
    iter_s: Any


def times(p: ThroughputParameters, gpus: Any, local_batch: Any, clock_mhz: Any, nodes: Any) -> Times:
    """Return a step's parts and its length.

    ``bs`` is ``local_batch``, ``n`` is ``gpus``, ``r = gpus / nodes``, ``f`` is ``clock_mhz``. Equation 4 as printed
    shares one ``beta`` between its cases; we assume that the node case has its own. The outer exponent of equation 5 is
    ``1 / gamma2``, without which it would not be a time.

    Source: PowerFlow, equations 2 to 5.
    """
    io_s = p.alpha_io + p.beta_io * local_batch * (gpus / nodes)
    grad_s = p.alpha_grad + (p.beta_grad + p.kappa_grad / clock_mhz) * local_batch
    local: Any = p.alpha_sync_local / clock_mhz + p.theta_sync_local
    local = local + (p.kappa_sync_local / clock_mhz + p.beta_sync_local) * (gpus - 2)
    node: Any = p.alpha_sync_node / clock_mhz + p.theta_sync_node
    node = node + (p.kappa_sync_node / clock_mhz + p.beta_sync_node) * (gpus - 2)
    several: Any = gpus >= 2
    sync_s: Any = several * np.where(nodes < 2, local, node)  # pyright: ignore[reportUnknownVariableType]
    return Times(io_s, grad_s, sync_s, _overlapped(_overlapped(io_s, grad_s, p.gamma1), sync_s, p.gamma2))


def _overlapped(one_s: Any, other_s: Any, gamma: Any) -> Any:
    """Return ``(a^gamma + b^gamma)^(1/gamma)``: the sum at 1, approaching the larger as gamma grows.

    The larger is factored out first: powers of bare step times would overflow or underflow, and this takes one power
    less.
    """
    larger = np.maximum(np.maximum(one_s, other_s), 1e-300)
    ratio = np.minimum(one_s, other_s) / larger
    return larger * (1.0 + ratio**gamma) ** (1.0 / gamma)


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
    """Return the three powers of one GPU, below and above the board's breaking point ``f0``.

    Below ``f0`` a board holds its voltage, so dynamic power rises with the clock and static power does not; above it
    the voltage also rises with the clock.

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
