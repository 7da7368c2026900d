"""From a node's energy intervals to ledger lines, footprints and profiles: once each, in one transaction."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from services.contracts.nodes import EnergyInterval, EnergyReceipt, EnergySource, Usage
from services.core.accounting.carbon import carbon_gco2
from services.core.domain.carbon import Signal
from services.db.database import Database
from services.kit.logging import Log
from services.telemetry.intensity import Intensity, IntensitySource
from services.telemetry.profiles import Profile, Step, advance

log = Log(__name__)

LEDGER_TOLERANCE = 1e-3
"""Device energy = sum over owners + idle, to this share."""

MEASURED = frozenset({EnergySource.COUNTER, EnergySource.SAMPLED})
_LEAST_KNOWN_LAST = list(EnergySource)

_STORE_INTERVALS = """
INSERT INTO energy_intervals (node_id, boot_id, sequence, start_at, end_at, metered_gpu_energy_j)
SELECT $1, i.* FROM unnest($2::text[], $3::bigint[], $4::timestamptz[], $5::timestamptz[], $6::float8[])
    AS i (boot_id, sequence, start_at, end_at, metered_j)
WHERE NOT EXISTS (
    SELECT FROM folded_intervals f
    WHERE f.node_id = $1 AND f.boot_id = i.boot_id AND f.through_sequence >= i.sequence)
ON CONFLICT DO NOTHING RETURNING boot_id, sequence
"""

_GANGS = """
SELECT id, job_id, generation, gpus, shares -> 0 ->> 'node_id' AS leader FROM allocations
WHERE id = ANY($2) AND shares @> jsonb_build_array(jsonb_build_object('node_id', $1::text))
"""

_STORE_USAGES = """
INSERT INTO energy_usages (
    node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, gpu_energy_j, cpu_energy_j, static_energy_j,
    source, cpu_source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue, carbon_gco2)
SELECT $1, u.boot_id, u.sequence, u.owner, u.job_id, u.start_at, u.end_at, u.gpus, u.gpu_j, u.cpu_j, u.static_j,
    u.source, $2, $3, u.signal, u.intensity, u.estimated, $4, u.carbon
FROM unnest($5::text[], $6::bigint[], $7::text[], $8::text[], $9::timestamptz[], $10::timestamptz[], $11::int[],
    $12::float8[], $13::float8[], $14::float8[], $15::text[], $16::text[], $17::float8[], $18::bool[], $19::float8[])
    AS u (boot_id, sequence, owner, job_id, start_at, end_at, gpus, gpu_j, cpu_j, static_j, source, signal,
          intensity, estimated, carbon)
"""

_ADD_FOOTPRINTS = """
INSERT INTO job_footprints AS known (job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s)
SELECT * FROM unnest($1::text[], $2::float8[], $3::float8[], $4::float8[], $5::float8[], $6::float8[]) ORDER BY 1
ON CONFLICT (job_id) DO UPDATE SET
    energy_j = known.energy_j + excluded.energy_j, gpu_energy_j = known.gpu_energy_j + excluded.gpu_energy_j,
    estimated_energy_j = known.estimated_energy_j + excluded.estimated_energy_j,
    carbon_gco2 = known.carbon_gco2 + excluded.carbon_gco2, gpu_s = known.gpu_s + excluded.gpu_s
"""

_PROFILES = """
SELECT p.* FROM job_profiles p JOIN unnest($1::text[], $2::int[]) AS w (job_id, gpus) USING (job_id, gpus)
ORDER BY p.job_id, p.gpus FOR UPDATE OF p
"""

_STORE_PROFILES = """
INSERT INTO job_profiles AS known
    (job_id, gpus, progress, energy_j, gpu_energy_j, duration_s, last_done, generation, since_at)
SELECT * FROM unnest($1::text[], $2::int[], $3::float8[], $4::float8[], $5::float8[], $6::float8[], $7::float8[],
    $8::int[], $9::timestamptz[]) ORDER BY 1, 2
ON CONFLICT (job_id, gpus) DO UPDATE SET
    progress = excluded.progress, energy_j = excluded.energy_j, gpu_energy_j = excluded.gpu_energy_j,
    duration_s = excluded.duration_s, last_done = excluded.last_done, generation = excluded.generation,
    since_at = excluded.since_at
"""

_LAST_USED = """
SELECT intensity_gco2_per_kwh, signal FROM energy_usages WHERE zone = $1 ORDER BY start_at DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Reporter:
    """The node an interval comes from."""

    node_id: str
    zone: str
    host_power: EnergySource


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

    @property
    def energy_j(self) -> float:
        """GPU, CPU and static energy."""
        return self.gpu_energy_j + self.cpu_energy_j + self.static_energy_j

    @property
    def estimated_energy_j(self) -> float:
        """The part that no instrument measured: static watts are always configuration."""
        gpu = 0.0 if self.source in MEASURED else self.gpu_energy_j
        cpu = 0.0 if self.cpu_source in MEASURED else self.cpu_energy_j
        return gpu + cpu + self.static_energy_j

    @property
    def gpu_s(self) -> float:
        """GPU seconds held."""
        return self.gpus * length_s(self.interval)


def length_s(interval: EnergyInterval) -> float:
    """Return the length of an interval; one that a clock turned back has made negative counts as empty."""
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
        """Store intervals that are not stored yet, with all that follows from them.

        Energy is taken to be spread evenly over its interval, so that the intensity of a line is the time-weighted
        mean over the interval.

        Raises:
            ProblemError: 503, no intensity is known for the node's zone; nothing was stored.
        """
        distinct = {(interval.boot_id, interval.sequence): interval for interval in intervals}
        priced: dict[tuple[str, int], Intensity] = {}
        for key, interval in distinct.items():
            start_s, end_s = interval.start_at.timestamp(), interval.end_at.timestamp()
            priced[key] = await self._intensities.during(reporter.zone, start_s, max(start_s, end_s))
            _check_sum(reporter, interval)
        async with self._database.transaction() as connection:
            stored = await connection.fetch(_STORE_INTERVALS, reporter.node_id, *_interval_columns(distinct))
            keys = sorted((row["boot_id"], row["sequence"]) for row in stored)
            fresh = sorted((distinct[key] for key in keys), key=lambda interval: interval.start_at)
            if fresh:
                gangs = await self._gangs(connection, reporter, fresh)
                lines = self._lines(reporter, fresh, priced, gangs)
                await connection.execute(
                    _STORE_USAGES, reporter.node_id, reporter.host_power, reporter.zone, self._pue, *_columns(lines)
                )
                await _add_footprints(connection, [line for line in lines if line.job_id is not None])
                await _advance_profiles(connection, reporter, lines, gangs)
        return EnergyReceipt(accepted=len(keys), duplicates=len(intervals) - len(keys))

    async def _gangs(self, connection: Any, reporter: Reporter, intervals: list[EnergyInterval]) -> dict[str, Any]:
        """Return the allocations named that have a share on this node: a node charges no other job."""
        named = {usage.allocation_id for interval in intervals for usage in interval.usages if usage.allocation_id}
        if not named:
            return {}
        rows = await connection.fetch(_GANGS, reporter.node_id, sorted(named))
        gangs = {row["id"]: row for row in rows}
        if strangers := named - gangs.keys():
            log.warning("energy.unknown_owner", node=reporter.node_id, allocations=sorted(strangers)[:5])
        return gangs

    def _lines(
        self,
        reporter: Reporter,
        intervals: list[EnergyInterval],
        priced: dict[tuple[str, int], Intensity],
        gangs: dict[str, Any],
    ) -> list[Line]:
        lines: list[Line] = []
        for interval in intervals:
            intensity = priced[interval.boot_id, interval.sequence]
            for owner, usage in merge_usages(interval.usages).items():
                energy_j = usage.gpu_energy_j + usage.cpu_energy_j + usage.static_energy_j
                lines.append(
                    Line(
                        interval=interval,
                        owner=owner,
                        job_id=gangs[owner]["job_id"] if owner in gangs else None,
                        gpus=len(set(usage.devices)),
                        gpu_energy_j=usage.gpu_energy_j,
                        cpu_energy_j=usage.cpu_energy_j,
                        static_energy_j=usage.static_energy_j,
                        source=usage.source,
                        cpu_source=reporter.host_power,
                        intensity=intensity,
                        carbon_gco2=carbon_gco2(energy_j, intensity.gco2_per_kwh, self._pue),
                        progress_done=usage.progress_done,
                    )
                )
        return lines


async def last_used_intensity(database: Database, zone: str) -> Intensity | None:
    """Return the intensity of the newest ledger line of a zone."""
    async with database.connection() as connection:
        row = await connection.fetchrow(_LAST_USED, zone)
    return Intensity(row["intensity_gco2_per_kwh"], Signal(row["signal"]), estimated=True) if row else None


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


def _interval_columns(intervals: dict[tuple[str, int], EnergyInterval]) -> list[list[Any]]:
    ordered = [intervals[key] for key in sorted(intervals)]
    return [
        [interval.boot_id for interval in ordered],
        [interval.sequence for interval in ordered],
        [interval.start_at for interval in ordered],
        [interval.end_at for interval in ordered],
        [interval.metered_gpu_energy_j for interval in ordered],
    ]


def _columns(lines: list[Line]) -> list[list[Any]]:
    return [
        [line.interval.boot_id for line in lines],
        [line.interval.sequence for line in lines],
        [line.owner for line in lines],
        [line.job_id for line in lines],
        [line.interval.start_at for line in lines],
        [line.interval.end_at for line in lines],
        [line.gpus for line in lines],
        [line.gpu_energy_j for line in lines],
        [line.cpu_energy_j for line in lines],
        [line.static_energy_j for line in lines],
        [line.source for line in lines],
        [line.intensity.signal for line in lines],
        [line.intensity.gco2_per_kwh for line in lines],
        [line.intensity.estimated for line in lines],
        [line.carbon_gco2 for line in lines],
    ]


async def _add_footprints(connection: Any, lines: list[Line]) -> None:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    for line in lines:
        assert line.job_id is not None
        amounts = (line.energy_j, line.gpu_energy_j, line.estimated_energy_j, line.carbon_gco2, line.gpu_s)
        for position, amount in enumerate(amounts):
            sums[line.job_id][position] += amount
    if sums:
        jobs = sorted(sums)
        columns = [[sums[job][position] for job in jobs] for position in range(5)]
        await connection.execute(_ADD_FOOTPRINTS, jobs, *columns)


async def _advance_profiles(connection: Any, reporter: Reporter, lines: list[Line], gangs: dict[str, Any]) -> None:
    wanted = sorted({(gang["job_id"], gang["gpus"]) for gang in gangs.values()})
    if not wanted:
        return
    jobs, sizes = [job for job, _ in wanted], [size for _, size in wanted]
    before = {(row["job_id"], row["gpus"]): _as_profile(row) for row in await connection.fetch(_PROFILES, jobs, sizes)}
    after: dict[tuple[str, int], Profile] = {}
    for line in lines:
        if (gang := gangs.get(line.owner)) is None:
            continue
        key = gang["job_id"], gang["gpus"]
        step = Step(
            generation=gang["generation"],
            start_s=line.interval.start_at.timestamp(),
            end_s=line.interval.end_at.timestamp(),
            energy_j=line.energy_j,
            gpu_energy_j=line.gpu_energy_j,
            leads=gang["leader"] == reporter.node_id,
            done=line.progress_done,
        )
        if (profile := advance(after.get(key, before.get(key)), step)) is not None:
            after[key] = profile
    changed = {key: profile for key, profile in after.items() if profile != before.get(key)}
    if changed:
        await connection.execute(_STORE_PROFILES, *_profile_columns(changed))


def _as_profile(row: Any) -> Profile:
    return Profile(
        progress=row["progress"],
        energy_j=row["energy_j"],
        gpu_energy_j=row["gpu_energy_j"],
        duration_s=row["duration_s"],
        last_done=row["last_done"] or 0.0,
        generation=row["generation"],
        since_s=row["since_at"].timestamp() if row["since_at"] else 0.0,
    )


def _profile_columns(profiles: dict[tuple[str, int], Profile]) -> list[list[Any]]:
    keys = sorted(profiles)
    rows = [profiles[key] for key in keys]
    return [
        [job for job, _ in keys],
        [size for _, size in keys],
        [row.progress for row in rows],
        [row.energy_j for row in rows],
        [row.gpu_energy_j for row in rows],
        [row.duration_s for row in rows],
        [row.last_done for row in rows],
        [row.generation for row in rows],
        [datetime.fromtimestamp(row.since_s, UTC) for row in rows],
    ]
