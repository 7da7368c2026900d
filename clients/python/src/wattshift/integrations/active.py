"""The trackers' runs that are active in this process."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from wattshift.integrations.tracking import read_record


def log_to_active_runs() -> bool:
    """Record this job's footprint so far in the MLflow run and the W&B run that are active in this process.

    Neither library is imported for this. A failure is logged and does no harm: training goes on.

    Returns:
        Whether it was recorded anywhere.
    """
    active = [name for name in ("mlflow", "wandb") if _is_active(name)]
    if not active or not os.environ.get("WATTSHIFT_API_KEY"):
        return False
    try:
        record = read_record(None, None)
        for name in active:
            if name == "mlflow":
                from wattshift.integrations.mlflow import write
            else:
                from wattshift.integrations.wandb import write
            write(record, None)
    except Exception as error:  # of the control plane, or of the tracker, whose classes are its own
        logging.getLogger("wattshift").warning("the footprint was not recorded: %s", error)
        return False
    return True


def _is_active(name: str) -> bool:
    module: Any = sys.modules.get(name)
    if module is None:
        return False
    return (module.active_run() if name == "mlflow" else module.run) is not None
