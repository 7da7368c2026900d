"""A job's work and energy at one gang size: the arithmetic of a ``job_profiles`` row."""

from dataclasses import dataclass
from typing import NamedTuple


class Profile(NamedTuple):
    """Progress and energy of one job at one gang size, over all its gangs of that size."""

    progress: float  #: Work done, in the job's unit
    energy_j: float  #: GPU, CPU and static energy it took
    gpu_energy_j: float  #: The GPUs' part
    duration_s: float  #: How long it was measured
    last_done: float  #: The newest gang's last report
    generation: int  #: The newest gang that counted
    since_s: float  #: When that gang first reported progress, UTC seconds; what came before does not count


@dataclass(frozen=True, slots=True)
class GangInterval:
    """One node's interval of a gang; ``start_s`` and ``end_s``: UTC seconds."""

    generation: int  #: The gang
    start_s: float
    end_s: float
    energy_j: float  #: GPU, CPU and static energy of the gang on this node
    gpu_energy_j: float  #: The GPUs' part
    leads: bool  #: Whether rank 0 is on this node: it reports progress, and its intervals measure the duration
    done: float | None  #: Progress at the end of the interval, where it is known
    shared: bool = False
    """Whether another gang ran on the same device: what was done then says nothing of the job alone."""


def advance(profile: Profile | None, interval: GangInterval) -> Profile | None:
    """Return the profile with one more interval, or None while nothing has been reported yet.

    A gang counts from its first report of progress, so that neither its start nor what it repeats after a restart
    weighs on its efficiency. Late intervals of a former gang, and those on a shared device, are left out. Progress that
    falls counts as none.
    """
    reports = interval.leads and interval.done is not None
    if profile is None or interval.generation > profile.generation:
        if not reports or interval.done is None:
            return profile
        if profile is None:
            return Profile(0.0, 0.0, 0.0, 0.0, interval.done, interval.generation, interval.end_s)
        return profile._replace(last_done=interval.done, generation=interval.generation, since_s=interval.end_s)
    if interval.generation < profile.generation or interval.end_s <= profile.since_s:
        return profile
    if interval.shared:
        done = profile.last_done if interval.done is None else interval.done
        return profile._replace(last_done=max(done, profile.last_done), since_s=interval.end_s)
    length_s = interval.end_s - interval.start_s
    counted_s = interval.end_s - max(interval.start_s, profile.since_s)
    share = counted_s / length_s if length_s > 0 else 0.0
    done = interval.done if reports and interval.done is not None else profile.last_done
    return profile._replace(
        progress=profile.progress + max(done - profile.last_done, 0.0),
        energy_j=profile.energy_j + share * interval.energy_j,
        gpu_energy_j=profile.gpu_energy_j + share * interval.gpu_energy_j,
        duration_s=profile.duration_s + (counted_s if interval.leads else 0.0),
        last_done=max(done, profile.last_done),
    )
