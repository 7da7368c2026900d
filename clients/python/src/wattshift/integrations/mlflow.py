"""For MLflow: ``pip install 'wattshift[mlflow]'``.

    from wattshift.integrations.mlflow import log_footprint

    log_footprint("job_01m7x7bdh29b0c6vxjkxnx11mt", run_id=run.info.run_id)

Energy, emissions, GPU hours and mean intensity become metrics of the run; the job and its grid zone become tags. When
it is called again, for example once the job has ended, it records the newer figures.
"""

from __future__ import annotations

from typing import Any

import mlflow

from wattshift.client import Client
from wattshift.integrations.tracking import Record, read_record


def log_footprint(job_id: str | None = None, *, run_id: str | None = None, client: Client | None = None) -> Record:
    """Record a job's footprint in a run, and return it.

    Args:
        job_id: The job; by default the one that this process belongs to.
        run_id: The run, which may have ended; by default the active one.
        client: By default one with `WATTSHIFT_URL` and `WATTSHIFT_API_KEY`.

    Raises:
        RuntimeError: No run is given, and none is active.
        ValueError: No job is given, and this process belongs to none.
        WattshiftError: The control plane refuses, or does not answer.
    """
    record = read_record(job_id, client)
    write(record, run_id)
    return record


def write(record: Record, run_id: str | None) -> None:
    """Write metrics and tags to a run, by default the active one."""
    library: Any = mlflow
    if run_id is None:
        active = library.active_run()
        if active is None:
            raise RuntimeError("no MLflow run is active: give run_id")
        run_id = active.info.run_id
    tracker = library.MlflowClient()
    for name, value in record.metrics.items():
        tracker.log_metric(run_id, name, value)
    for name, value in record.labels.items():
        tracker.set_tag(run_id, name, value)
