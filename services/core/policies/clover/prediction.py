"""What many configurations would do, in closed form: a screen for the search, before anything is measured.

Requests go to the server that has been free the longest. Every server therefore rests about equally long between two
requests, so a server of service time s serves ``1 / (s + rest)`` requests per second, and the rest is what makes the
servers together serve the arrivals. Waiting follows Sakasegawa's approximation of the probability that all servers
are busy, and an exponential tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.policies.clover.application import Application

_HALVINGS = 40
_TAIL = 0.05


@dataclass(frozen=True)
class Predictions:
    """Of some configurations.

    Attributes:
        accuracy: (configurations,) per cent.
        energy_j: (configurations,) per request, idle draw included.
        p95_s: (configurations,) 95th percentile of latency; infinite where the servers cannot keep up.
        load: (configurations,) requests as a share of what the servers can serve.
    """

    accuracy: Floats
    energy_j: Floats
    p95_s: Floats
    load: Floats


def predict(application: Application, weights: Ints, gpus: int, rate_per_s: float) -> Predictions:
    """Return what configurations (n, variants, 5), each with an instance, would do at a rate of requests."""
    here = application.fits.ravel()
    count = weights.reshape(len(weights), -1)[:, here].astype(np.float64)
    service_s = application.service_s.ravel()[here]
    capacity = count @ (1 / service_s)
    load = rate_per_s / capacity
    low: Floats = np.zeros(len(count))
    high: Floats = count.sum(axis=1) / rate_per_s
    for _ in range(_HALVINGS):
        rest = (low + high) / 2
        served = (count / (service_s + rest[:, None])).sum(axis=1)
        low, high = np.where(served > rate_per_s, rest, low), np.where(served > rate_per_s, high, rest)
    flow = count / (service_s + ((low + high) / 2)[:, None])
    shares = flow / flow.sum(axis=1, keepdims=True)
    busy_j = shares @ (service_s * application.busy_w.ravel()[here])
    throughput = np.minimum(rate_per_s, capacity)
    return Predictions(
        accuracy=shares @ np.repeat(application.accuracy, weights.shape[2])[here],
        energy_j=busy_j + gpus * application.idle_w / throughput,
        p95_s=_p95_s(shares, service_s, count.sum(axis=1), capacity, load, rate_per_s),
        load=load,
    )


def _p95_s(
    shares: Floats, service_s: Floats, servers: Floats, capacity: Floats, load: Floats, rate_per_s: float
) -> Floats:
    busy = np.minimum(load, 1.0) ** (np.sqrt(2 * (servers + 1)) - 1)
    decay = 2 * np.maximum(capacity - rate_per_s, 1e-9)  # of deterministic service: half an exponential one's wait
    low: Floats = np.zeros(len(shares))
    high: Floats = service_s.max() + 10 / decay
    for _ in range(_HALVINGS):
        limit = (low + high) / 2
        spare = limit[:, None] - service_s
        late = np.where(spare < 0, 1.0, busy[:, None] * np.exp(-np.maximum(spare, 0) * decay[:, None]))
        over = (shares * late).sum(axis=1) > _TAIL
        low, high = np.where(over, limit, low), np.where(over, high, limit)
    return np.where(load < 1, high, np.inf)
