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
from services.telemetry.figures import INTERVALS, note_line
from services.telemetry.intensity import Intensity, IntensitySource
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

    def zone_at(self, time_s: float) -> str:
        """Return the zone the node was in at ``time_s``, UTC seconds.

        ``zones`` are those it was in, each with the time since when, oldest first; none: always in ``zone``.
        """
        began = [zone for since_s, zone in self.zones if since_s <= time_s]
        return began[-1] if began else self.zones[0][1] if self.zones else self.zone


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the ledger: an owner's energy over one interval; all energies in joules at the device."""

    interval: EnergyInterval
    owner: str
    job_id: str | None
    gpus: int
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

    async def store(self, reporter: Reporter, intervals: list[EnergyInterval]) -> EnergyReceipt:
        """Store intervals that are not stored yet, and update everything that depends on them.

        Energy is assumed to be spread evenly over its interval, so that the intensity of a line is the time-weighted
        mean over the interval. A node that was moved to another zone is charged the zone in which an interval began.

        Raises:
            ProblemError: 503, no intensity is known for the node's zone; nothing was stored.
        """
        distinct = {(interval.boot_id, interval.sequence): interval for interval in intervals}
        priced: dict[tuple[str, int], Intensity] = {}
        for key, interval in distinct.items():
            start_s, end_s = interval.start_at.timestamp(), interval.end_at.timestamp()
            priced[key] = await self._intensities.during(reporter.zone_at(start_s), start_s, max(start_s, end_s))
            _check_sum(reporter, interval)
        async with self._database.transaction() as connection:
            rows = [_interval_row(distinct[key]) for key in sorted(distinct)]
            keys = sorted(await energy.store_intervals(connection, reporter.node_id, rows))
            lines: list[Line] = []
            gangs: dict[str, energy.GangRow] = {}
            fresh = sorted((distinct[key] for key in keys), key=lambda interval: interval.start_at)
            if fresh:
                gangs = await self._gangs(connection, reporter, fresh)
                lines = self._lines(reporter, fresh, priced, gangs)
                for zone, usages in _by_zone(reporter, lines).items():
                    await energy.store_usages(
                        connection, reporter.node_id, reporter.host_power, zone, self._pue, usages
                    )
                await _add_footprints(connection, [line for line in lines if line.job_id is not None])
                await _advance_profiles(connection, reporter, lines, gangs)
        if fresh:
            _count(reporter, lines, gangs, len(fresh))
        return EnergyReceipt(accepted=len(keys), duplicates=len(intervals) - len(keys))

    async def _gangs(
        self, connection: Connection, reporter: Reporter, intervals: list[EnergyInterval]
    ) -> dict[str, energy.GangRow]:
        """Return the allocations named that have a share on this node: a node charges no other job."""
        named = {usage.allocation_id for interval in intervals for usage in interval.usages if usage.allocation_id}
        if not named:
            return {}
        gangs = await energy.gangs_on(connection, reporter.node_id, named)
        if strangers := named - gangs.keys():
            log.warning("energy.unknown_owner", node=reporter.node_id, allocations=sorted(strangers)[:5])
        return gangs

    def _lines(
        self,
        reporter: Reporter,
        intervals: list[EnergyInterval],
        priced: dict[tuple[str, int], Intensity],
        gangs: Mapping[str, energy.GangRow],
    ) -> list[Line]:
        lines: list[Line] = []
        for interval in intervals:
            intensity = priced[interval.boot_id, interval.sequence]
            holders = Counter(
                device for usage in interval.usages if usage.allocation_id for device in set(usage.devices)
            )
            for owner, usage in merge_usages(interval.usages).items():
                energy_j = usage.gpu_energy_j + usage.cpu_energy_j + usage.static_energy_j
                lines.append(
                    Line(
                        interval=interval,
                        owner=owner,
                        job_id=gangs[owner].job_id if owner in gangs else None,
                        gpus=len(set(usage.devices)),
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


async def last_used_intensity(database: Database, zone: str) -> Intensity | None:
    """Return the intensity of the newest ledger line of a zone."""
    row = await energy.last_used(database, zone)
    return Intensity(row.gco2_per_kwh, Signal(row.signal), estimated=True) if row else None


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


def _count(reporter: Reporter, lines: Sequence[Line], gangs: Mapping[str, energy.GangRow], intervals: int) -> None:
    """Count what was committed, for ``/metrics``."""
    INTERVALS.inc(intervals)
    for line in lines:
        gang = gangs.get(line.owner)
        tenant, project = (gang.tenant_id, gang.project) if gang else ("", "")
        zone = reporter.zone_at(line.interval.start_at.timestamp())
        note_line(tenant, project, zone, line.energy_j, line.carbon_gco2)


def _by_zone(reporter: Reporter, lines: Sequence[Line]) -> dict[str, list[energy.UsageRow]]:
    rows: dict[str, list[energy.UsageRow]] = defaultdict(list)
    for line in lines:
        rows[reporter.zone_at(line.interval.start_at.timestamp())].append(_usage_row(line))
    return rows


def _interval_row(interval: EnergyInterval) -> energy.IntervalRow:
    return energy.IntervalRow(
        interval.boot_id, interval.sequence, interval.start_at, interval.end_at, interval.metered_gpu_energy_j
    )


def _usage_row(line: Line) -> energy.UsageRow:
    return energy.UsageRow(
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


async def _advance_profiles(
    connection: Connection, reporter: Reporter, lines: Sequence[Line], gangs: Mapping[str, energy.GangRow]
) -> None:
    wanted = sorted({(gang.job_id, gang.gpus) for gang in gangs.values()})
    if not wanted:
        return
    before = {(row.job_id, row.gpus): _as_profile(row) for row in await energy.lock_profiles(connection, wanted)}
    after: dict[tuple[str, int], Profile] = {}
    for line in lines:
        if (gang := gangs.get(line.owner)) is None:
            continue
        key = gang.job_id, gang.gpus
        interval = GangInterval(
            generation=gang.generation,
            start_s=line.interval.start_at.timestamp(),
            end_s=line.interval.end_at.timestamp(),
            energy_j=line.energy_j,
            gpu_energy_j=line.gpu_energy_j,
            leads=gang.leader == reporter.node_id,
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
