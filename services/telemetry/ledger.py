"""From a node's energy intervals to ledger lines, footprints and profiles: once each, in one transaction."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from services.contracts.nodes import Basis, EnergyInterval, EnergyReceipt, EnergySource, Usage
from services.core.accounting.carbon import carbon_gco2
from services.core.accounting.meters import booked_j
from services.core.domain.carbon import Signal
from services.db.database import Connection, Database
from services.kit.logging import Log
from services.kit.release import RELEASE
from services.telemetry.figures import INTERVALS, MARKED, note_line
from services.telemetry.intensity import Intensity, IntensitySource, Origin
from services.telemetry.measured import ENERGIES, part_of
from services.telemetry.repository import energy
from services.telemetry.repository.energy import Profile
from services.telemetry.repository.lines import KNOWN_LATE_S
from services.telemetry.repository.nodes import Reporter
from services.telemetry.repository.rules import LEDGER_TOLERANCE

log = Log(__name__)

_LEAST_KNOWN_LAST = list(EnergySource)
_KNOWN_LATE = timedelta(seconds=KNOWN_LATE_S)
_LONGEST_S = 7 * 86_400.0
"""For no longer does hardware count as having drawn the most it can: however long an interval is claimed to be, which
an agent that was away for weeks rightly does, of idle power."""
_LONG_S = 3_600.0
"""An interval longer than this is that of an agent which was away; what was booked of its time before was not away."""
_LEAST_J = 1e-12
"""Less is nothing: products of smaller numbers underflow in the database, which then refuses the whole report."""


class Line(NamedTuple):
    """A line of the ledger, the gang that it is of, and what tells how that gets on."""

    row: energy.UsageRow
    gang: energy.GangRow | None  #: None: it is idle
    done: float | None  #: Progress at the end of the interval, where it is known
    shared: bool  #: Whether another gang ran on the same device: what was done then says nothing of the job alone


def length_s(interval: EnergyInterval) -> float:
    """Return the length of an interval, seconds; 0 if the node's clock was set back within it."""
    return max(0.0, (interval.end_at - interval.start_at).total_seconds())


def merge_usages(usages: list[Usage]) -> dict[str, Usage]:
    """Return one usage per owner (idle is the empty name); energies add up, and the least certain source is kept."""
    merged: dict[str, Usage] = {}
    for usage in usages:
        owner = usage.allocation_id or ""
        known = merged.get(owner)
        if known is None:
            merged[owner] = usage
            continue
        dones = [done for done in (known.progress_done, usage.progress_done) if done is not None]
        sums = {name: getattr(known, name) + getattr(usage, name) for name in ENERGIES}
        changes: dict[str, object] = {
            "devices": sorted({*known.devices, *usage.devices}),
            "source": max(known.source, usage.source, key=_LEAST_KNOWN_LAST.index),
            "progress_done": max(dones, default=None),
            "basis": known.basis or usage.basis,
            "until": max(known.until, usage.until) if known.until and usage.until else None,
        }
        merged[owner] = known.model_copy(update=sums | changes)
    return merged


class Ledger:
    """Writes the ledger."""

    def __init__(self, database: Database, intensities: IntensitySource, pue: float) -> None:
        self._database, self._intensities, self._pue = database, intensities, pue

    async def store(self, reporter: Reporter, intervals: Sequence[EnergyInterval]) -> EnergyReceipt:
        """Store intervals that are not stored yet, and update everything that depends on them.

        Energy is assumed to be spread evenly over its interval, so that the intensity of a line is the time-weighted
        mean over the interval. If a node was moved to another zone, the zone in which an interval began is charged.

        Raises:
            ProblemError: 503 if no intensity is known for the node's zone; nothing was stored.
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
        booked = await self._booked(distinct)
        priced: dict[energy.IntervalKey, Intensity] = {}
        for key, (reporter, interval) in distinct.items():
            start_s, end_s = interval.start_at.timestamp(), interval.end_at.timestamp()
            priced[key] = await self._intensities.during(reporter.zone_at(start_s), start_s, max(start_s, end_s))
            _check_sum(reporter, interval)
        async with self._database.transaction() as connection:
            rows: list[energy.IntervalRow] = []
            for key, (_, interval) in sorted(distinct.items()):
                as_reported = None if interval is booked[key] else interval.metered_gpu_energy_j
                metered_j = booked[key].metered_gpu_energy_j
                rows.append(energy.IntervalRow(*key, interval.start_at, interval.end_at, metered_j, as_reported))
            keys = await energy.store_intervals(connection, rows)
            fresh = [_Fresh(*distinct[key], booked[key], priced[key]) for key in sorted(keys)]
            fresh.sort(key=lambda each: each.reported.start_at)
            lines: list[Line] = []
            if fresh:
                gangs = await _gangs_of(connection, fresh)
                lines = [line for each in fresh for line in self._lines(each, gangs)]
                await energy.store_usages(connection, self._pue, RELEASE, [line.row for line in lines])
                await _add_footprints(connection, lines)
                await _advance_profiles(connection, lines)
                if doubted := _doubted(lines):
                    await energy.count_marked(connection, doubted)
        if fresh:
            _count(lines, len(fresh))
        accepted = Counter(key.node_id for key in keys)
        return [
            EnergyReceipt(accepted=accepted[each.node_id], duplicates=len(intervals) - accepted[each.node_id])
            for each, intervals in reports
        ]

    async def _booked(
        self, reported: Mapping[energy.IntervalKey, _Reported]
    ) -> dict[energy.IntervalKey, EnergyInterval]:
        """Return intervals as they are booked; a long one has no time that the node's earlier ones cover."""
        long = {key.node_id for key, (_, interval) in reported.items() if length_s(interval) > _LONG_S}
        through = await energy.booked_through(self._database, long) if long else {}
        booked: dict[energy.IntervalKey, EnergyInterval] = {}
        for key, (reporter, interval) in sorted(reported.items(), key=lambda each: each[1][1].start_at):
            since, covered_s = through.get(key.node_id, interval.start_at), 0.0
            if length_s(interval) > _LONG_S:
                covered_s = (min(since, interval.end_at) - interval.start_at).total_seconds()
            booked[key] = _as_booked(reporter, interval, max(covered_s, 0.0))
            through[key.node_id] = max(since, interval.end_at)
        return booked

    def _lines(self, fresh: _Fresh, gangs: _Gangs) -> list[Line]:
        reporter, interval, intensity = fresh.reporter, fresh.booked, fresh.intensity
        lines: list[Line] = []
        usages = _of_the_living(reporter, interval, gangs)
        reported: dict[str, Usage] = {}
        if interval is not fresh.reported:
            reported = merge_usages(_of_the_living(reporter, fresh.reported, gangs))
        holders = Counter(device for usage in usages if usage.allocation_id for device in set(usage.devices))
        for owner, usage in merge_usages(usages).items():
            gang = gangs.get((reporter.held_as, owner))
            amounts = usage.gpu_energy_j, usage.cpu_energy_j, usage.static_energy_j
            gpu_j, cpu_j, static_j = (0.0 if amount < _LEAST_J else amount for amount in amounts)
            devices, end_at = sorted({*usage.devices}), interval.end_at
            if usage.until is not None:
                end_at = max(min(usage.until, end_at), interval.start_at)
            start_at = min(_from(gang, interval), end_at)
            row = energy.UsageRow(
                node_id=reporter.node_id,
                cpu_source=interval.cpu_source or reporter.host_power,
                zone=reporter.zone_at(interval.start_at.timestamp()),
                boot_id=interval.boot_id,
                sequence=interval.sequence,
                owner=owner,
                job_id=gang.job_id if gang else None,
                start_at=start_at,
                end_at=end_at,
                gpus=len(devices),
                gpu_energy_j=gpu_j,
                cpu_energy_j=cpu_j,
                static_energy_j=static_j,
                source=usage.source,
                signal=intensity.signal,
                intensity_gco2_per_kwh=intensity.gco2_per_kwh,
                intensity_estimated=intensity.estimated,
                carbon_gco2=carbon_gco2(gpu_j + cpu_j + static_j, intensity.gco2_per_kwh, self._pue),
                devices=f"{{{','.join(map(str, devices))}}}",
                provider=intensity.origin.provider,
                intensity_kind=intensity.origin.kind,
                fetched_at=intensity.origin.fetched_at,
                basis=usage.basis,
                reported_energy_j=sum(getattr(reported[owner], name) for name in ENERGIES)
                if owner in reported
                else None,
            )
            shared = any(holders[device] > 1 for device in usage.devices)
            lines.append(Line(row, gang, usage.progress_done, shared))
        return lines


class _Fresh(NamedTuple):
    """An interval that was not stored before, as it was reported and as it is booked."""

    reporter: Reporter
    reported: EnergyInterval
    booked: EnergyInterval
    intensity: Intensity


_Reported = tuple[Reporter, EnergyInterval]
_Gangs = Mapping[tuple[str, str], energy.GangRow]


async def _gangs_of(connection: Connection, fresh: Sequence[_Fresh]) -> _Gangs:
    """Return the named allocations that have a share on the node that names them: a node can charge no other job."""
    named = {
        (each.reporter.held_as, usage.allocation_id)
        for each in fresh
        for usage in each.reported.usages
        if usage.allocation_id
    }
    gangs = await energy.gangs_on(connection, named) if named else {}
    if strangers := sorted(named - gangs.keys()):
        log.warning("energy.unknown_owner", node=strangers[0][0], allocations=[each for _, each in strangers[:5]])
    return gangs


def _as_booked(reporter: Reporter, interval: EnergyInterval, covered_s: float) -> EnergyInterval:
    """Return an interval as it is booked: no more energy than the node's hardware can use beside ``covered_s``."""
    within_s = min(length_s(interval) - covered_s, _LONGEST_S)
    gpu_j = sum(usage.gpu_energy_j for usage in interval.usages)
    host_j = sum(usage.cpu_energy_j + usage.static_energy_j for usage in interval.usages)
    gpu_part = _part(gpu_j, reporter.most_gpu_w, within_s)
    metered_part = _part(interval.metered_gpu_energy_j, reporter.most_gpu_w, within_s)
    host_part = _part(host_j, reporter.most_host_w, within_s)
    if gpu_part == metered_part == host_part == 1.0:
        return interval
    log.warning(
        "energy.beyond_hardware",
        **_named(reporter, interval),
        seconds=length_s(interval),
        gpu_j=gpu_j,
        host_j=host_j,
    )
    usages = [
        usage.model_copy(
            update={
                "gpu_energy_j": usage.gpu_energy_j * gpu_part,
                "cpu_energy_j": usage.cpu_energy_j * host_part,
                "static_energy_j": usage.static_energy_j * host_part,
                "source": usage.source if gpu_part == 1.0 else EnergySource.MODELLED,
                "basis": Basis.HARDWARE,
            }
        )
        for usage in interval.usages
    ]
    changes: dict[str, object] = {
        "metered_gpu_energy_j": interval.metered_gpu_energy_j * metered_part,
        "usages": usages,
        "cpu_source": interval.cpu_source if host_part == 1.0 else EnergySource.MODELLED,
    }
    return interval.model_copy(update=changes)


def _part(reported_j: float, most_w: float | None, within_s: float) -> float:
    if most_w is None or reported_j == 0:
        return 1.0
    booked = booked_j(reported_j, most_w, within_s)
    return 1.0 if booked == reported_j else booked / reported_j


def _of_the_living(reporter: Reporter, interval: EnergyInterval, gangs: _Gangs) -> list[Usage]:
    """Return the usages of an interval; one that names a gang that was not there is idle.

    If an interval begins before a gang or goes on after its end by more than an agent takes to know, that part is idle,
    with power taken as even. An agent that modelled over an absence, or measures for an engine, has done so already.
    """
    usages: list[Usage] = []
    for usage in interval.usages:
        gang = gangs.get((reporter.held_as, usage.allocation_id or ""))
        if gang is None:
            usages.append(usage)
            continue
        is_early = gang.began_at is not None and interval.end_at < gang.began_at - _KNOWN_LATE
        if is_early or (gang.ended_at is not None and interval.start_at >= gang.ended_at):
            log.warning("energy.outside_life", node=reporter.node_id, allocation_id=gang.id, at=str(interval.start_at))
            usages.append(_idle(usage, 1.0))
            continue
        until, outside_s = usage.until, (_from(gang, interval) - interval.start_at).total_seconds()
        if gang.ended_at is not None and until is None and interval.end_at > gang.ended_at + _KNOWN_LATE:
            until = gang.ended_at
            if usage.source is not EnergySource.MODELLED:
                outside_s += (interval.end_at - gang.ended_at).total_seconds()
        if not outside_s and until == usage.until:
            usages.append(usage)
            continue
        log.warning("energy.outside_life", node=reporter.node_id, allocation_id=gang.id, at=str(until))
        rest = 0.0 if reporter.engine_node is not None else min(outside_s / length_s(interval), 1.0)
        usages.append(part_of(usage, 1 - rest, devices=usage.devices, until=until, basis=Basis.LIFE))
        usages.append(_idle(usage, rest))
    return usages


def _from(gang: energy.GangRow | None, interval: EnergyInterval) -> datetime:
    """Return when an interval is a gang's from: later than its start where the gang began later by more than clocks."""
    began_at = interval.start_at if gang is None or gang.began_at is None else gang.began_at
    return began_at if interval.start_at < began_at - _KNOWN_LATE else interval.start_at


def _idle(usage: Usage, share: float) -> Usage:
    basis = usage.basis or Basis.LIFE
    return part_of(usage, share, allocation_id=None, progress_done=None, until=None, basis=basis)


def _doubted(lines: Sequence[Line]) -> dict[str, int]:
    """Return how many intervals of each node were not booked as its meters measured them."""
    marked = {
        (row.node_id, row.boot_id, row.sequence)
        for row, *_ in lines
        if row.basis is not None and row.basis is not Basis.LIFE
    }
    return dict(Counter(node_id for node_id, _, _ in marked))


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
        log.warning("energy.does_not_add_up", **_named(reporter, interval), owners_j=owners_j)


def _named(reporter: Reporter, interval: EnergyInterval) -> dict[str, Any]:
    named = {"node": reporter.node_id, "boot": interval.boot_id, "sequence": interval.sequence}
    return {**named, "metered_j": interval.metered_gpu_energy_j}


def _count(lines: Sequence[Line], intervals: int) -> None:
    """Count what was committed, for ``/metrics``."""
    INTERVALS.inc(intervals)
    for row, gang, *_ in lines:
        tenant, project = (gang.tenant_id, gang.project) if gang else ("", "")
        note_line(tenant, project, row.zone, row.energy_j, row.carbon_gco2)
        if row.basis is not None:
            MARKED.labels(row.basis).inc()


async def _add_footprints(connection: Connection, lines: Sequence[Line]) -> None:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    for row, *_ in lines:
        if row.job_id is not None:
            amounts = row.energy_j, row.gpu_energy_j, row.estimated_energy_j, row.carbon_gco2, row.gpu_s
            sums[row.job_id] = [known + more for known, more in zip(sums[row.job_id], amounts, strict=True)]
    if sums:
        await energy.add_footprints(connection, [energy.FootprintRow(job, *sums[job]) for job in sorted(sums)])


async def _advance_profiles(connection: Connection, lines: Sequence[Line]) -> None:
    of_gangs = [(line, line.gang) for line in lines if line.gang is not None]
    if not of_gangs:
        return
    before = await energy.lock_profiles(connection, sorted({(gang.job_id, gang.gpus) for _, gang in of_gangs}))
    after: dict[tuple[str, int], Profile] = {}
    for line, gang in of_gangs:
        key = gang.job_id, gang.gpus
        if (profile := advance(after.get(key, before.get(key)), line, gang)) is not None:
            after[key] = profile
    changed = {key: after[key] for key in sorted(after) if after[key] != before.get(key)}
    if changed:
        await energy.store_profiles(connection, changed)


def advance(profile: Profile | None, line: Line, gang: energy.GangRow) -> Profile | None:
    """Return the profile with one more line of a gang, or None while nothing has been reported yet.

    The node of rank 0 reports progress, and its lines measure the duration. A gang counts from its first report, so
    that neither its start nor what it repeats after a restart weighs on its efficiency. Late intervals of a former
    gang, and those on a shared device, are left out. Progress that falls counts as none.
    """
    row, leads = line.row, gang.leader == gang.node_id
    start_s, end_s = row.start_at.timestamp(), row.end_at.timestamp()
    reported = line.done if leads else None
    if profile is None or gang.generation > profile.generation:
        if reported is None:
            return profile
        if profile is None:
            return Profile(0.0, 0.0, 0.0, 0.0, reported, gang.generation, end_s)
        return profile._replace(last_done=reported, generation=gang.generation, since_s=end_s)
    if gang.generation < profile.generation or end_s <= profile.since_s:
        return profile
    if line.shared:
        done = profile.last_done if line.done is None else line.done
        return profile._replace(last_done=max(done, profile.last_done), since_s=end_s)
    counted_s = end_s - max(start_s, profile.since_s)
    share = counted_s / (end_s - start_s) if end_s > start_s else 0.0
    done = profile.last_done if reported is None else reported
    return profile._replace(
        progress=profile.progress + max(done - profile.last_done, 0.0),
        energy_j=profile.energy_j + share * row.energy_j,
        gpu_energy_j=profile.gpu_energy_j + share * row.gpu_energy_j,
        duration_s=profile.duration_s + (counted_s if leads else 0.0),
        last_done=max(done, profile.last_done),
    )
