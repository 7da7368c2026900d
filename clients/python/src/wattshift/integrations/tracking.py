"""What a job has used and emitted, as experiment trackers record it: figures and labels under ``wattshift/``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from wattshift import models
from wattshift.client import Client

J_PER_KWH = 3.6e6
S_PER_H = 3_600.0


@dataclass(frozen=True)
class Record:
    """A job's footprint for a tracker.

    Attributes:
        metrics: ``energy_kwh`` of devices and hosts, ``gpu_hours``, ``carbon_gco2`` (location-based, with PUE),
            ``estimated_share`` of the energy, 0..1, and ``intensity_gco2_per_kwh``, the mean over the energy that
            was used; the last two are left out before any energy was recorded.
        labels: ``job_id``, and ``zone``, ``signal`` and ``pue`` once they are known.
    """

    metrics: dict[str, float]
    labels: dict[str, str]


def record_of(found: models.JobFootprintReport) -> Record:
    """Return a footprint as figures and labels."""
    footprint, kwh = found.footprint, found.footprint.energy_j / J_PER_KWH
    metrics = {
        "wattshift/energy_kwh": kwh,
        "wattshift/gpu_hours": footprint.gpu_s / S_PER_H,
        "wattshift/carbon_gco2": footprint.carbon_gco2,
    }
    if kwh:
        metrics["wattshift/estimated_share"] = footprint.estimated_energy_j / footprint.energy_j
        metrics["wattshift/intensity_gco2_per_kwh"] = footprint.carbon_gco2 / (kwh * (found.pue or 1.0))
    labels = {"job_id": found.job_id, "zone": found.zone, "signal": found.signal, "pue": found.pue}
    return Record(metrics, {f"wattshift/{name}": str(value) for name, value in labels.items() if value is not None})


def read_record(job_id: str | None, client: Client | None) -> Record:
    """Read a job's footprint.

    Args:
        job_id: The job; None for the one that this process belongs to.
        client: By default one with `WATTSHIFT_URL` and `WATTSHIFT_API_KEY`.

    Raises:
        ValueError: No job is given, and this process belongs to none.
        WattshiftError: The control plane refuses, or does not answer.
    """
    chosen = job_id or os.environ.get("WATTSHIFT_JOB_ID")
    if not chosen:
        raise ValueError("job_id is missing: this process does not belong to a job")
    if client is not None:
        return record_of(client.footprint(chosen))
    with Client(timeout_s=10, retries=1) as made:
        return record_of(made.footprint(chosen))
