"""PowerFlow's throughput model: what a step's time is made of.

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
