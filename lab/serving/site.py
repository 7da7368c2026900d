"""What a pool's file says, as the simulator needs it: classes, servers and limits.

The file is what ``wattshift pools set`` takes, with a maximum number of GPUs in each place and, in each profile, the
measured latency, TTFT and TBT.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from lab.bundles import path_of
from lab.serving.model_server import LOWEST_CLOCK_MHZ, ModelServer
from lab.serving.profiled import profiled_server
from services.contracts.pools import ModeProfile
from services.contracts.serving import PoolPartition, PoolSpec
from services.core.domain.arrays import Ints
from services.core.domain.errors import DomainError
from services.core.domain.gpus import gpu_model
from services.core.domain.serving import CLASSES, LatencyLimits
from services.core.policies.freesh.classes import Thresholds
from services.core.policies.freesh.laxity import ServiceTimes
from services.core.policies.freesh.miad import Clocks
from services.core.policies.freesh.server_choice import EnergyProfile, energy_profile
from services.simulator.raw import TraceFormatError

PAPERS = "freesh_pools.json"


def papers_pools() -> PoolSpec:
    """Return the pool of FREESH's authors: Llama-3-70B on their GPUs in three places, with their profiles."""
    text = path_of(PAPERS).read_text(encoding="utf-8")
    return PoolSpec.model_validate_json(text)


@dataclass(frozen=True)
class ServerKind:
    """The servers of one mode that serve one class of one partition.

    Attributes:
        server: Its times and power.
        times: Of its profile, at the load that it was measured at: what ``Lat`` is computed from.
        limits: Of the class, for clocks.
        clocks: That its GPUs support.
        weight: Its part in a weighted round robin: the requests per second that it serves.
        start_j: Energy of starting one.
        energy: What requests add there.
    """

    server: ModelServer
    times: ServiceTimes
    limits: LatencyLimits
    clocks: Clocks
    weight: float
    start_j: float
    energy: EnergyProfile | None


class Site:
    """A pool's classes and servers.

    Raises:
        TraceFormatError: A place states no GPUs, or a profile no latencies.
    """

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        for place in spec.places:
            if place.gpus is None:
                raise TraceFormatError(f"the pool's file states no gpus for place {place.name}, so none can be planned")
        self._partitions = {part.name: part for part in spec.partitions}
        self._modes = {mode.name: mode for mode in spec.modes}
        self.kind = cache(self._kind)
        try:
            for part in spec.partitions:
                for each in part.classes:
                    for profile in each.profiles:
                        if profile.max_qps > 0:
                            self.kind(part.name, each.name, profile.mode)
        except DomainError as error:
            raise TraceFormatError(f"the pool's file: {error}") from None

    def partition(self, name: str) -> PoolPartition:
        """Return a partition by its name."""
        return self._partitions[name]

    def class_names(self, partition: str) -> list[str]:
        """Return the names of a partition's classes, in the order of ``classes_of``."""
        part = self.partition(partition)
        return [part.classes[0].name] if part.thresholds is None else list(CLASSES)

    def classes_of(self, partition: str, input_tokens: Ints, output_tokens: Ints) -> Ints:
        """Return the class of each request, as a place in ``class_names``: (n_requests,)."""
        thresholds = self.partition(partition).thresholds
        if thresholds is None:
            return np.zeros(input_tokens.size, np.int64)
        return Thresholds(thresholds.input_tokens, thresholds.output_tokens).class_of(input_tokens, output_tokens)

    def gpus(self, mode: str) -> int:
        """Return the GPUs of an instance."""
        return self._modes[mode].gpus

    def memory_gib(self, mode: str) -> float:
        """Return the memory of all GPUs of an instance."""
        return self._modes[mode].gpus * gpu_model(self._modes[mode].gpu_model).memory_gib

    def _kind(self, partition: str, request_class: str, mode: str) -> ServerKind:
        terms = next(each for each in self.partition(partition).classes if each.name == request_class)
        profile = next((each for each in terms.profiles if each.mode == mode), None)
        where = f"class {request_class} of partition {partition}, mode {mode}"
        if profile is None:
            raise TraceFormatError(f"there is no profile for {where}")
        if profile.latency_s is None or profile.ttft_ms is None or profile.tbt_ms is None:
            raise TraceFormatError(f"the profile for {where} lacks latency_s, ttft_ms or tbt_ms")
        board = gpu_model(self._modes[mode].gpu_model)
        clocks = clocks_between(max(LOWEST_CLOCK_MHZ, board.lowest_clock_mhz), board.highest_clock_mhz)
        times = ServiceTimes(1e-3 * profile.ttft_ms, 1e-3 * profile.tbt_ms)
        load = profile.max_qps, profile.latency_s, times.ttft_s, times.tbt_s
        return ServerKind(
            energy=energy_profile(profile.power_w, self._idle_w(mode), *load),
            server=profiled_server(
                max_qps=profile.max_qps,
                latency_s=profile.latency_s,
                ttft_ms=profile.ttft_ms,
                tbt_ms=profile.tbt_ms,
                busy_w=profile.power_w,
                idle_w=self._idle_w(mode),
                highest_clock_mhz=clocks.highest,
            ),
            times=times,
            limits=terms.latency_limits(),
            clocks=clocks,
            weight=profile.max_qps,
            start_j=3_600 * self.spec.switching_wh(self._modes[mode])[0],
        )

    def _idle_w(self, mode: str) -> float:
        if (stated := self._modes[mode].idle_w) is not None:
            return stated
        return min(profile.power_w for profile in self._profiles(mode))

    def _profiles(self, mode: str) -> list[ModeProfile]:
        classes = (each for part in self.spec.partitions for each in part.classes)
        return [profile for each in classes for profile in each.profiles if profile.mode == mode]


def clocks_between(lowest_mhz: float, highest_mhz: float, step_mhz: float = 15.0) -> Clocks:
    """Return clocks in even steps down from the highest, as on NVIDIA's devices (15 MHz)."""
    if not 0 < lowest_mhz <= highest_mhz or not step_mhz > 0:
        raise DomainError("clocks go in steps above 0 MHz from above 0 MHz to no less")
    steps = int((highest_mhz - lowest_mhz) / step_mhz + 1e-9)
    return Clocks(tuple(highest_mhz - step_mhz * at for at in range(steps, -1, -1)))
