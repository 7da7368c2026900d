"""What many configurations would do, in closed form: a screen for the search, before anything is measured.

Requests go to the server that has been free the longest. Every server therefore rests about equally long between two
requests, so a server with service time s serves ``1 / (s + rest)`` requests per second, and the rest is such that the
servers together keep up with the arrivals. Waiting follows Sakasegawa's approximation of the probability that all
servers are busy, and an exponential tail.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.policies.clover.application import Application

TAIL = 0.05  #: Share of requests beyond the 95th percentile
_HALVINGS = 40


@dataclass(frozen=True)
class Predictions:
    """Predictions for several configurations."""

    accuracy: Floats  #: (configurations,) per cent
    energy_j: Floats  #: (configurations,) per request, including idle draw
    load: Floats  #: (configurations,) requests as a share of what the servers can serve
    shares: Floats  #: (configurations, kinds) share of the requests that each kind of server serves
    service_s: Floats  #: (kinds,) their service times
    busy: Floats  #: (configurations,) probability that a request finds all servers busy
    decay_per_s: Floats  #: (configurations,) rate at which long waits become rarer

    def late_share(self, limit_s: float | Floats) -> Floats:
        """Return the share of requests that take longer than a limit; 1 if the servers cannot keep up.

        Shape (configurations,); the limit is one for all, or also (configurations,).
        """
        spare = np.reshape(limit_s, (-1, 1)) - self.service_s
        late = np.where(spare < 0, 1.0, self.busy[:, None] * np.exp(-np.maximum(spare, 0) * self.decay_per_s[:, None]))
        return np.where(self.load < 1, (self.shares * late).sum(axis=1), 1.0)

    @cached_property
    def p95_s(self) -> Floats:
        """(configurations,) 95th percentile latency; infinite if the servers cannot keep up."""
        low: Floats = np.zeros(len(self.load))
        high: Floats = self.service_s.max() + 10 / self.decay_per_s
        for _ in range(_HALVINGS):
            limit = (low + high) / 2
            over = self.late_share(limit) > TAIL
            low, high = np.where(over, limit, low), np.where(over, high, limit)
        return np.where(self.load < 1, high, np.inf)


def predict(application: Application, weights: Ints, gpus: int, rate_per_s: float) -> Predictions:
    """Return what configurations (n, variants, 5), each with at least one instance, would do at a rate of requests."""
    here = application.fits.ravel()
    count = weights.reshape(len(weights), -1)[:, here].astype(np.float64)
    service_s = application.service_s.ravel()[here]
    capacity = count @ (1 / service_s)
    load = rate_per_s / capacity
    servers = count.sum(axis=1)
    low: Floats = np.zeros(len(count))
    high: Floats = servers / rate_per_s
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
        load=load,
        shares=shares,
        service_s=service_s,
        busy=np.minimum(load, 1.0) ** (np.sqrt(2 * (servers + 1)) - 1),
        decay_per_s=2 * np.maximum(capacity - rate_per_s, 1e-9),  # service that varies little halves the wait
    )
