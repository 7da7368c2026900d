"""Energy of an engine's nodes, booked by the models of their GPUs: an idle GPU draws its board's idle power.

A GPU held by a job draws what is usual for its model. All of it is marked as modelled. An interval is numbered by the
time at which it ends, so that a bridge that restarts books nothing twice.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from services.contracts.codes import ProblemCode
from services.contracts.engines import EngineEnergyReport, EngineJob, EngineNode
from services.contracts.nodes import EnergyInterval, EnergyReceipt, EnergySource, Usage
from services.core.profiles.boards import board_of
from services.core.profiles.priors import ANY_FAMILY, family_of
from services.kit.control_plane import ControlPlane
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)

_BOOT = "engine"
_OF_ALL = (401, 403, 429, 502, 503, 504)  #: Answers that say nothing of the node: nobody answers, or all is refused
_MOST = 100  #: Intervals kept of a node while the control plane does not answer


class ModelledEnergy:
    """The estimated energy of each node and job, in intervals of equal length."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._since_s = 0.0
        self._due: dict[str, list[EnergyInterval]] = {}

    async def book(
        self, control_plane: ControlPlane, nodes: Sequence[EngineNode], live: Sequence[EngineJob], now_s: float
    ) -> None:
        """Book the intervals that are over, including any not acknowledged yet."""
        end_s = now_s // self._length_s * self._length_s
        start_s, self._since_s = self._since_s, end_s
        if not start_s or end_s <= start_s:
            return
        for node in nodes:
            interval = _interval(node, live, start_s, end_s)
            self._due[node.name] = [*self._due.get(node.name, []), interval][-_MOST:]
        for name in list(self._due):
            report = EngineEnergyReport(node=name, intervals=self._due[name])
            try:
                await control_plane.call("engine-energy", report, EnergyReceipt, 10.0)
            except ProblemError as error:
                log.warning("energy.not_booked", node=name, error=error.detail)
                if error.problem_code == ProblemCode.UNKNOWN_ZONE:
                    continue  # no intensity is known yet: it is kept, and sent with the next interval
                if error.status in _OF_ALL:
                    return
                if error.status not in (404, 422):  # this node's alone: it is kept, and the others' is sent
                    continue
            del self._due[name]  # of what was refused, none will ever be booked


def _interval(node: EngineNode, live: Sequence[EngineJob], start_s: float, end_s: float) -> EnergyInterval:
    board = board_of(node.gpu_model)
    busy_w = board.idle_w + family_of(ANY_FAMILY).demand * (board.peak_w - board.idle_w)
    usages: list[Usage] = []
    idle = set(range(node.gpus))
    for job in live:
        devices = [device for share in job.shares if share.node == node.name for device in share.devices]
        if devices:
            began_s = job.started_at.timestamp() if job.started_at else start_s
            began_s = min(max(began_s, start_s), end_s)
            joules = len(devices) * (busy_w * (end_s - began_s) + board.idle_w * (began_s - start_s))
            usages.append(_usage(job.external_id, devices, joules))
            idle -= set(devices)
    if idle:
        usages.append(_usage(None, sorted(idle), len(idle) * board.idle_w * (end_s - start_s)))
    return EnergyInterval(
        boot_id=_BOOT,
        sequence=int(end_s),
        start_at=datetime.fromtimestamp(start_s, UTC),
        end_at=datetime.fromtimestamp(end_s, UTC),
        metered_gpu_energy_j=sum(usage.gpu_energy_j for usage in usages),
        usages=usages,
    )


def _usage(owner: str | None, devices: Sequence[int], joules: float) -> Usage:
    by = EnergySource.MODELLED
    return Usage(
        allocation_id=owner,
        devices=list(devices),
        gpu_energy_j=joules,
        cpu_energy_j=0.0,
        static_energy_j=0.0,
        source=by,
    )
