"""For Weights & Biases: ``pip install 'wattshift[wandb]'``.

    from wattshift.integrations.wandb import log_footprint

    log_footprint("job_01m7x7bdh29b0c6vxjkxnx11mt", run=run)

Energy, emissions, GPU hours and mean intensity go into the summary of the run; the job and its grid zone go into its
configuration. When it is called again, for example once the job has ended, it records the newer figures.
"""

from __future__ import annotations

from typing import Any

import wandb

from wattshift.client import Client
from wattshift.integrations.tracking import Record, read_record


def log_footprint(job_id: str | None = None, *, run: Any = None, client: Client | None = None) -> Record:
    """Record a job's footprint in a run, and return it.

    Args:
        job_id: The job; by default the one that this process belongs to.
        run: What ``wandb.init`` returned; by default the active run.
        client: By default one with `WATTSHIFT_URL` and `WATTSHIFT_API_KEY`.

    Raises:
        RuntimeError: No run is given, and none is active.
        ValueError: No job is given, and this process belongs to none.
        WattshiftError: The control plane refuses, or does not answer.
    """
    record = read_record(job_id, client)
    write(record, run)
    return record


def write(record: Record, run: Any) -> None:
    """Write figures and labels to a run, by default the active one."""
    library: Any = wandb
    chosen = run if run is not None else library.run
    if chosen is None:
        raise RuntimeError("no W&B run is active: give run")
    chosen.summary.update(record.metrics)
    chosen.config.update(record.labels, allow_val_change=True)
