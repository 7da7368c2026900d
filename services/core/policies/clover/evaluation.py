"""What a configuration does at a given load: latency, accuracy and energy, by the queue model."""

from dataclasses import dataclass, field

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.request_queue import Arrivals, serve

QUANTILES: Floats = (np.arange(200, dtype=np.float64) + 0.5) / 200


@dataclass(frozen=True)
class Outcome:
    """What was measured of a configuration."""

    graph: ConfigGraph  #: The configuration
    accuracy: float  #: Mean over requests of the accuracy of the variant that answered
    energy_j: float  #: Per request, including idle draw
    p95_s: float  #: 95th percentile of latency
    latency_s: Floats = field(default_factory=lambda: np.empty(0))
    """(200,) quantiles of latency at ``QUANTILES``; empty where they are not known."""


@dataclass
class QueueEvaluator:
    """Measures configurations by serving the same requests with each; equal graphs are served only once."""

    application: Application  #: What is served
    gpus: int  #: How many GPUs there are; all of them draw their idle power
    rate_per_s: float  #: Mean rate of requests
    arrivals: Arrivals  #: The requests
    _known: dict[bytes, Outcome] = field(default_factory=dict[bytes, Outcome])

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise DomainError(f"at least 1 GPU is needed, not {self.gpus}")
        if not (np.isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise DomainError("the rate of requests is a number above 0")

    def measure(self, graph: ConfigGraph) -> Outcome:
        found = self._known.get(graph.key)
        if found is None:
            found = self._known[graph.key] = self._measure(graph)
        return found

    def _measure(self, graph: ConfigGraph) -> Outcome:
        app = self.application
        rows, columns = np.nonzero(graph.weights)
        service_s = app.service_s[rows, columns]
        if not service_s.size or not np.isfinite(service_s).all():
            raise DomainError("a configuration needs instances, on slices that their variants fit")
        served = serve(
            self.arrivals, self.rate_per_s, graph.weights[rows, columns], service_s, app.jitter_s[rows, columns]
        )
        shares = np.bincount(served.kinds, minlength=rows.size) / served.kinds.size
        busy_j = float(shares @ (service_s * app.busy_w[rows, columns]))
        quantiles = np.quantile(served.latency_s, QUANTILES)
        return Outcome(
            graph,
            accuracy=float(shares @ app.accuracy[rows]),
            energy_j=busy_j + self.gpus * app.idle_w / min(self.rate_per_s, app.capacity_per_s(graph.weights)),
            p95_s=float(np.quantile(served.latency_s, 0.95)),
            latency_s=quantiles,
        )
