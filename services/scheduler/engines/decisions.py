"""What plans and users want of engines' jobs, on its way to the bridges: stored, and put into the outbox if new."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from services.contracts.engines import EngineAction, EngineMode
from services.contracts.streams import command_stream
from services.core.cycle.plan import Hold, Start
from services.core.cycle.snapshot import Snapshot
from services.core.domain.units import J_PER_KWH
from services.core.profiles.boards import board_of
from services.db.database import Connection
from services.scheduler.ingest.gangs import EndReason
from services.scheduler.ingest.reports import mark_stopping
from services.scheduler.repository import engines, outbox
from services.scheduler.repository.documents import Json
from services.scheduler.repository.gangs import StoppableGang
from services.scheduler.repository.outbox import Outgoing

DECISIONS_OF_A_COMMAND = 500


def hold_note(snapshot: Snapshot, hold: Hold) -> str:
    """Return what users read about a waiting job: why it waits, until when, and what it would then emit."""
    words = f"waits:{hold.reason.value}"
    if hold.expected_start_s is None:
        return words
    node = _first_node(snapshot, snapshot.jobs.index[hold.job_id])
    outlook = snapshot.outlooks[int(snapshot.nodes.zone[node]) if node is not None else 0]
    start_s, emitted = hold.expected_start_s, hold_gco2(snapshot, hold, hold.expected_start_s)
    words += f" start:{datetime.fromtimestamp(start_s, UTC):%Y-%m-%dT%H:%MZ}"
    words += f" grid:{outlook.curve.at(start_s):.0f}gCO2/kWh"
    return words if emitted is None else f"{words} run:{emitted}gCO2"


def hold_gco2(snapshot: Snapshot, hold: Hold, start_s: float | None) -> int | None:
    """Return the emissions expected of a waiting job's run from then on, grams; None if they cannot be estimated."""
    at = snapshot.jobs.index[hold.job_id]
    node = _first_node(snapshot, at)
    if start_s is None or node is None:
        return None
    return _run_gco2(snapshot, at, node, int(snapshot.jobs.min_gpus[at]), start_s)


def hold_saves_gco2(snapshot: Snapshot, hold: Hold) -> int | None:
    """Return how much less a waiting job's run will emit than one that begins now, grams; None if that is unknown."""
    now, later = (hold_gco2(snapshot, hold, start_s) for start_s in (snapshot.now_s, hold.expected_start_s))
    return None if now is None or later is None else now - later


def start_gco2(snapshot: Snapshot, start: Start) -> int | None:
    """Return the emissions expected of a released job's run, grams; None if they cannot be estimated."""
    node = snapshot.nodes.index[start.placement.shares[0].node_id]
    return _run_gco2(snapshot, snapshot.jobs.index[start.job_id], node, start.gpus, snapshot.now_s)


def _run_gco2(snapshot: Snapshot, job: int, node: int, gpus: int, start_s: float) -> int | None:
    """Return the emissions of a job on ``gpus`` GPUs at full power for its predicted remaining time, whole grams."""
    length_s = float(snapshot.jobs.remaining_s[job])
    if not math.isfinite(length_s):
        return None
    model = snapshot.gpu_models[int(snapshot.nodes.gpu_model[node])]
    mean = snapshot.outlooks[int(snapshot.nodes.zone[node])].curve.mean(start_s, start_s + length_s)
    return round(gpus * board_of(model).peak_w * length_s / J_PER_KWH * mean)


def start_note(snapshot: Snapshot, start: Start) -> str:
    """Return what users read about a released job: how green the grid is, and what the job has emitted so far."""
    at = snapshot.jobs.index[start.job_id]
    zone = snapshot.nodes.zone[snapshot.nodes.index[start.placement.shares[0].node_id]]
    now = snapshot.outlooks[int(zone)].curve.at(snapshot.now_s)
    return f"released grid:{now:.0f}gCO2/kWh emitted:{float(snapshot.jobs.carbon_gco2[at]):.0f}gCO2"


def _first_node(snapshot: Snapshot, job: int) -> int | None:
    """Return the first node that a job may run on."""
    suits = snapshot.jobs.eligible[job][snapshot.nodes.gpu_model]
    return next((at for at, may in enumerate(suits.tolist()) if may), None)


def held(hold: Hold, note: str, gco2: int | None = None) -> Json:
    """Return the decision to hold a job whose run is expected to emit ``gco2`` grams."""
    start_s = hold.expected_start_s
    when = {} if start_s is None else {"until": datetime.fromtimestamp(round(start_s / 60) * 60, UTC).isoformat()}
    return {"action": EngineAction.HOLD.value, "note": note} | when | _grams(gco2)


def zone_of(snapshot: Snapshot, start: Start) -> str | None:
    """Return the grid zone that a start was planned in; None if there are several."""
    nodes = snapshot.nodes
    zones = {snapshot.outlooks[int(nodes.zone[nodes.index[share.node_id]])].zone for share in start.placement.shares}
    return zones.pop() if len(zones) == 1 else None


def released(gpus: int, note: str, zone: str | None = None, gco2: int | None = None) -> Json:
    """Return the decision to start a job, expected to emit ``gco2`` grams, as soon as its engine has room."""
    where = {} if zone is None else {"zone": zone}
    return {"action": EngineAction.RELEASE.value, "gpus": gpus, "note": note} | where | _grams(gco2)


def _grams(gco2: int | None) -> Json:
    return {} if gco2 is None else {"gco2": gco2}


def requeued(grace_s: float, note: str) -> Json:
    """Return the decision to stop a job and start it again later."""
    return {"action": EngineAction.REQUEUE.value, "grace_s": grace_s, "note": note}


def shrunk(gpus: int, grace_s: float, note: str) -> Json:
    """Return the decision to run a job on with fewer GPUs."""
    return {"action": EngineAction.SHRINK.value, "gpus": gpus, "grace_s": grace_s, "note": note}


CANCELLED: Json = {"action": EngineAction.CANCEL.value}
ON_HOLD: Json = {"action": EngineAction.HOLD.value, "note": "waits:held"}


async def decide(connection: Connection, wanted: Mapping[str, Json]) -> int:
    """Store what is wanted of engines' jobs, and send it unless for a dry run; return how many decisions are new."""
    found = await engines.decide(connection, wanted)
    await send(connection, ((row.engine, row.decision) for row in found if row.mode == EngineMode.CONTROL))
    counts = Counter(
        (row.engine, ("" if row.mode == EngineMode.CONTROL else "would_") + str(row.decision["action"]))
        for row in found
    )
    await engines.count(connection, counts)
    return len(found)


async def send(connection: Connection, decisions: Iterable[tuple[str, Json]]) -> None:
    """Put decisions into the outbox, many per command."""
    by_engine: dict[str, list[Json]] = {}
    for engine, decision in decisions:
        by_engine.setdefault(engine, []).append(decision)
    commands = [
        Outgoing(command_stream(engine), {"type": "direct", "decisions": found[at : at + DECISIONS_OF_A_COMMAND]})
        for engine, found in by_engine.items()
        for at in range(0, len(found), DECISIONS_OF_A_COMMAND)
    ]
    await outbox.put(connection, commands)


async def stop_run(
    connection: Connection, gang: StoppableGang, reason: EndReason, *, detail: str, code: str | None = None
) -> bool:
    """Begin to stop a run of an engine's job and tell its bridge; return whether it was running."""
    if not await mark_stopping(connection, gang, reason, detail=detail, code=code):
        return False
    stopped = CANCELLED if reason is EndReason.CANCELLED else requeued(gang.grace_s, f"stopped:{code or reason.value}")
    await decide(connection, {gang.job_id: stopped})
    return True
