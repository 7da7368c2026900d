"""From a node's energy intervals to ledger lines, footprints and profiles: once each, in one transaction."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from services.contracts.nodes import EnergyInterval, EnergyReceipt, EnergySource, Usage
from services.core.accounting.carbon import carbon_gco2
from services.core.domain.carbon import Signal
from services.db.database import Connection, Database
from services.kit.logging import Log
from services.kit.release import RELEASE
from services.telemetry.figures import INTERVALS, note_line
from services.telemetry.intensity import Intensity, IntensitySource, Origin
from services.telemetry.profiles import GangInterval, Profile, advance
from services.telemetry.repository import energy
from services.telemetry.repository.rules import LEDGER_TOLERANCE

log = Log(__name__)

MEASURED = frozenset({EnergySource.COUNTER, EnergySource.SAMPLED})
_LEAST_KNOWN_LAST = list(EnergySource)


@dataclass(frozen=True, slots=True)
class Reporter:
    """The node an interval comes from."""

    node_id: str
    zone: str
    host_power: EnergySource
    zones: Sequence[tuple[float, str]] = ()
    engine_node: str | None = None

    @property
    def held_as(self) -> str:
        """The node that its gangs have their shares on: the engine's, where it measures one."""
        return self.engine_node or self.node_id

    def zone_at(self, time_s: float) -> str:
        """Return the zone the node was in at ``time_s``, UTC seconds.

        ``zones`` are those it was in, each with the time since when, oldest first; none: always in ``zone``.
        """
        began = [zone for since_s, zone in self.zones if since_s <= time_s]
        return began[-1] if began else self.zones[0][1] if self.zones else self.zone


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the ledger: an owner's energy over one interval; all energies in joules at the device."""

    reporter: Reporter
    interval: EnergyInterval
    owner: str
    job_id: str | None
    devices: Sequence[int]
    gpu_energy_j: float
    cpu_energy_j: float
    static_energy_j: float
    source: EnergySource
    cpu_source: EnergySource
    intensity: Intensity
    carbon_gco2: float
    progress_done: float | None
    shared: bool = False

    @property
    def energy_j(self) -> float:
        """GPU, CPU and static energy."""
        return self.gpu_energy_j + self.cpu_energy_j + self.static_energy_j

    @property
    def estimated_energy_j(self) -> float:
        """The part that was not measured: static watts are always configuration."""
        gpu = 0.0 if self.source in MEASURED else self.gpu_energy_j
        cpu = 0.0 if self.cpu_source in MEASURED else self.cpu_energy_j
        return gpu + cpu + self.static_energy_j

    @property
    def zone(self) -> str:
        """Where the energy was used."""
        return self.reporter.zone_at(self.interval.start_at.timestamp())

    @property
    def gpus(self) -> int:
        """How many devices the owner held."""
        return len(self.devices)

    @property
    def gpu_s(self) -> float:
        """GPU seconds held."""
        return self.gpus * length_s(self.interval)


def length_s(interval: EnergyInterval) -> float:
    """Return the length of an interval, seconds; 0 if the node's clock was set back within it."""
    return max(0.0, (interval.end_at - interval.start_at).total_seconds())


def merge_usages(usages: list[Usage]) -> dict[str, Usage]:
    """Return one usage per owner (idle is the empty name); energies add up, the least certain source stays."""
    merged: dict[str, Usage] = {}
    for usage in usages:
        owner = usage.allocation_id or ""
        known = merged.get(owner)
        if known is None:
            merged[owner] = usage
            continue
        dones = [done for done in (known.progress_done, usage.progress_done) if done is not None]
        merged[owner] = Usage(
            allocation_id=usage.allocation_id,
            devices=sorted({*known.devices, *usage.devices}),
            gpu_energy_j=known.gpu_energy_j + usage.gpu_energy_j,
            cpu_energy_j=known.cpu_energy_j + usage.cpu_energy_j,
            static_energy_j=known.static_energy_j + usage.static_energy_j,
            source=max(known.source, usage.source, key=_LEAST_KNOWN_LAST.index),
            progress_done=max(dones, default=None),
        )
    return merged


class Ledger:
    """Writes the ledger."""

    def __init__(self, database: Database, intensities: IntensitySource, pue: float) -> None:
        self._database = database
        self._intensities = intensities
        self._pue = pue

    async def store(self, reporter: Reporter, intervals: Sequence[EnergyInterval]) -> EnergyReceipt:
        """Store intervals that are not stored yet, and update everything that depends on them.

        Energy is assumed to be spread evenly over its interval, so that the intensity of a line is the time-weighted
        mean over the interval. A node that was moved to another zone is charged the zone in which an interval began.

        Raises:
            ProblemError: 503, no intensity is known for the node's zone; nothing was stored.
        """
        (receipt,) = await self.store_all([(reporter, intervals)])
        return receipt

    async def store_all(self, reports: Sequence[tuple[Reporter, Sequence[EnergyInterval]]]) -> list[EnergyReceipt]:
        """Store the intervals of several nodes, as ``store`` does, all or none; return a receipt for each."""
        distinct = {
            energy.IntervalKey(reporter.node_id, interval.boot_id, interval.sequence): (reporter, interval)
            for reporter, intervals in reports
            for interval in intervals
        }
        priced: dict[energy.IntervalKey, Intensity] = {}
        for key, (reporter, interval) in distinct.items():
            start_s, end_s = interval.start_at.timestamp(), interval.end_at.timestamp()
            priced[key] = await self._intensities.during(reporter.zone_at(start_s), start_s, max(start_s, end_s))
            _check_sum(reporter, interval)
        async with self._database.transaction() as connection:
            rows = [_interval_row(key, distinct[key][1]) for key in sorted(distinct)]
            keys = await energy.store_intervals(connection, rows)
            fresh = sorted(((*distinct[key], priced[key]) for key in sorted(keys)), key=lambda each: each[1].start_at)
            gangs: _Gangs = {}
            lines: list[Line] = []
            if fresh:
                gangs = await _gangs_of(connection, fresh)
                lines = [line for each in fresh for line in self._lines(*each, gangs)]
                await energy.store_usages(connection, self._pue, RELEASE, [_usage_row(line) for line in lines])
                await _add_footprints(connection, [line for line in lines if line.job_id is not None])
                await _advance_profiles(connection, lines, gangs)
        if fresh:
            _count(lines, gangs, len(fresh))
        accepted = Counter(key.node_id for key in keys)
        return [
            EnergyReceipt(accepted=accepted[each.node_id], duplicates=len(intervals) - accepted[each.node_id])
            for each, intervals in reports
        ]

    def _lines(self, reporter: Reporter, interval: EnergyInterval, intensity: Intensity, gangs: _Gangs) -> list[Line]:
        lines: list[Line] = []
        usages = _of_the_living(reporter, interval, gangs)
        holders = Counter(device for usage in usages if usage.allocation_id for device in set(usage.devices))
        for owner, usage in merge_usages(usages).items():
            energy_j = usage.gpu_energy_j + usage.cpu_energy_j + usage.static_energy_j
            gang = gangs.get((reporter.held_as, owner))
            lines.append(
                Line(
                    reporter=reporter,
                    interval=interval,
                    owner=owner,
                    job_id=gang.job_id if gang else None,
                    devices=sorted({*usage.devices}),
                    gpu_energy_j=usage.gpu_energy_j,
                    cpu_energy_j=usage.cpu_energy_j,
                    static_energy_j=usage.static_energy_j,
                    source=usage.source,
                    cpu_source=reporter.host_power,
                    intensity=intensity,
                    carbon_gco2=carbon_gco2(energy_j, intensity.gco2_per_kwh, self._pue),
                    progress_done=usage.progress_done,
                    shared=any(holders[device] > 1 for device in usage.devices),
                )
            )
        return lines


_Gangs = Mapping[tuple[str, str], energy.GangRow]


async def _gangs_of(connection: Connection, fresh: Sequence[tuple[Reporter, EnergyInterval, Intensity]]) -> _Gangs:
    """Return the allocations named that have a share on the node that names them: a node charges no other job."""
    named = {
        (reporter.held_as, usage.allocation_id)
        for reporter, interval, _ in fresh
        for usage in interval.usages
        if usage.allocation_id
    }
    gangs = await energy.gangs_on(connection, named) if named else {}
    if strangers := sorted(named - gangs.keys()):
        log.warning("energy.unknown_owner", node=strangers[0][0], allocations=[each for _, each in strangers[:5]])
    return gangs


def _of_the_living(reporter: Reporter, interval: EnergyInterval, gangs: _Gangs) -> list[Usage]:
    """Return the usages of an interval; what names a gang that had ended on the node before is idle."""
    usages: list[Usage] = []
    for usage in interval.usages:
        gang = gangs.get((reporter.held_as, usage.allocation_id or ""))
        if gang is not None and gang.ended_at is not None and interval.start_at >= gang.ended_at:
            log.warning("energy.after_end", node=reporter.node_id, allocation_id=gang.id, at=str(interval.start_at))
            usage = usage.model_copy(update={"allocation_id": None, "progress_done": None})
        usages.append(usage)
    return usages


async def last_used_intensity(database: Database, zone: str) -> Intensity | None:
    """Return the intensity of the newest ledger line of a zone."""
    row = await energy.last_used(database, zone)
    if row is None:
        return None
    origin = Origin(row.provider, "last_used", row.fetched_at)
    return Intensity(row.gco2_per_kwh, Signal(row.signal), estimated=True, origin=origin)


def _check_sum(reporter: Reporter, interval: EnergyInterval) -> None:
    """Log an interval whose parts do not add up; it is stored as it is, and the invariants show it."""
    owners_j = sum(usage.gpu_energy_j for usage in interval.usages)
    metered_j = interval.metered_gpu_energy_j
    if abs(owners_j - metered_j) > LEDGER_TOLERANCE * metered_j + 1e-6:
        log.warning(
            "energy.does_not_add_up",
            node=reporter.node_id,
            boot=interval.boot_id,
            sequence=interval.sequence,
            owners_j=owners_j,
            metered_j=metered_j,
        )


def _count(lines: Sequence[Line], gangs: _Gangs, intervals: int) -> None:
    """Count what was committed, for ``/metrics``."""
    INTERVALS.inc(intervals)
    for line in lines:
        gang = gangs.get((line.reporter.held_as, line.owner))
        tenant, project = (gang.tenant_id, gang.project) if gang else ("", "")
        note_line(tenant, project, line.zone, line.energy_j, line.carbon_gco2)


def _interval_row(key: energy.IntervalKey, interval: EnergyInterval) -> energy.IntervalRow:
    return energy.IntervalRow(*key, interval.start_at, interval.end_at, interval.metered_gpu_energy_j)


def _usage_row(line: Line) -> energy.UsageRow:
    return energy.UsageRow(
        node_id=line.reporter.node_id,
        cpu_source=line.cpu_source,
        zone=line.zone,
        boot_id=line.interval.boot_id,
        sequence=line.interval.sequence,
        owner=line.owner,
        job_id=line.job_id,
        start_at=line.interval.start_at,
        end_at=line.interval.end_at,
        gpus=line.gpus,
        gpu_energy_j=line.gpu_energy_j,
        cpu_energy_j=line.cpu_energy_j,
        static_energy_j=line.static_energy_j,
        source=line.source,
        signal=line.intensity.signal,
        intensity_gco2_per_kwh=line.intensity.gco2_per_kwh,
        intensity_estimated=line.intensity.estimated,
        carbon_gco2=line.carbon_gco2,
        devices=f"{{{','.join(map(str, line.devices))}}}",
        provider=line.intensity.origin.provider,
        intensity_kind=line.intensity.origin.kind,
        fetched_at=line.intensity.origin.fetched_at,
    )


async def _add_footprints(connection: Connection, lines: Sequence[Line]) -> None:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    for line in lines:
        assert line.job_id is not None
        amounts = (line.energy_j, line.gpu_energy_j, line.estimated_energy_j, line.carbon_gco2, line.gpu_s)
        for position, amount in enumerate(amounts):
            sums[line.job_id][position] += amount
    if sums:
        await energy.add_footprints(connection, [energy.FootprintRow(job, *sums[job]) for job in sorted(sums)])


async def _advance_profiles(connection: Connection, lines: Sequence[Line], gangs: _Gangs) -> None:
    wanted = sorted({(gang.job_id, gang.gpus) for gang in gangs.values()})
    if not wanted:
        return
    before = {(row.job_id, row.gpus): _as_profile(row) for row in await energy.lock_profiles(connection, wanted)}
    after: dict[tuple[str, int], Profile] = {}
    for line in lines:
        if (gang := gangs.get((line.reporter.held_as, line.owner))) is None:
            continue
        key = gang.job_id, gang.gpus
        interval = GangInterval(
            generation=gang.generation,
            start_s=line.interval.start_at.timestamp(),
            end_s=line.interval.end_at.timestamp(),
            energy_j=line.energy_j,
            gpu_energy_j=line.gpu_energy_j,
            leads=gang.leader == line.reporter.held_as,
            done=line.progress_done,
            shared=line.shared,
        )
        if (profile := advance(after.get(key, before.get(key)), interval)) is not None:
            after[key] = profile
    changed = [_profile_row(key, after[key]) for key in sorted(after) if after[key] != before.get(key)]
    if changed:
        await energy.store_profiles(connection, changed)


def _as_profile(row: energy.ProfileRow) -> Profile:
    return Profile(
        progress=row.progress,
        energy_j=row.energy_j,
        gpu_energy_j=row.gpu_energy_j,
        duration_s=row.duration_s,
        last_done=row.last_done,
        generation=row.generation,
        since_s=row.since_at.timestamp() if row.since_at else 0.0,
    )


def _profile_row(key: tuple[str, int], profile: Profile) -> energy.ProfileRow:
    return energy.ProfileRow(
        *key,
        progress=profile.progress,
        energy_j=profile.energy_j,
        gpu_energy_j=profile.gpu_energy_j,
        duration_s=profile.duration_s,
        last_done=profile.last_done,
        generation=profile.generation,
        since_at=datetime.fromtimestamp(profile.since_s, UTC),
    )
