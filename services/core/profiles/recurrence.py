"""How long a job will run, predicted from earlier jobs of its group: a recurring job is the same job, submitted again.

A *group* is a hash of what its submissions have in common. A predictor is fitted to the jobs that have ended and then
predicts an amount for a (group, user): iterations, work or seconds, whatever the history counts. The prediction for an
unseen group is 0, so that a policy that orders by length runs it at once.

Source: A-SRPT section IV-C, 3.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints

EXACT = 0.01  #: A prediction that is off by less than this share of the truth counts as exact


def group_id(meta: Mapping[str, object]) -> int:
    """Return the group of a submission, 0 .. 2^63 - 1: equal for equal metadata, JSON values, whatever its order."""
    text = json.dumps(meta, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Runs:
    """Jobs that have ended; every column is (n_jobs,), in the same order."""

    group: Ints  #: The group of each job
    user: Ints  #: Its user
    amount: Floats  #: The actual amount, in the predictions' unit

    def __len__(self) -> int:
        return self.amount.size


@dataclass(frozen=True)
class Predictions:
    """Predicted amounts; every column is (n_jobs,)."""

    amount: Floats  #: The predicted amount; 0 for an unseen group
    spread: Floats  #: How far apart earlier jobs, or the model's parts, lie: a standard deviation
    seen: Bools  #: Whether the group occurred before


@dataclass(frozen=True)
class Evaluation:
    """How good predictions were."""

    jobs: int  #: How many jobs
    seen: float  #: Share whose group was known
    exact: float  #: Share that was off by less than ``EXACT`` of the truth
    within_tenth: float  #: Share that was off by less than a tenth of it
    mean_error: float  #: Mean absolute error, in the amounts' unit


def evaluate(predictions: Predictions, amount: Floats) -> Evaluation:
    """Return the errors of predictions, given the actual amounts: (n_jobs,), at least one."""
    error = np.abs(predictions.amount - amount)
    return Evaluation(
        jobs=amount.size,
        seen=float(predictions.seen.mean()),
        exact=float((error < EXACT * amount).mean()),
        within_tenth=float((error < 0.1 * amount).mean()),
        mean_error=float(error.mean()),
    )


GROUP_VERSION = 1
"""Raised whenever equal specs may get another group; models and history of another version are not used."""

LABELS = ("dataset", "kind", "model")
_NUMBERS = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*", re.IGNORECASE)


def job_group(tenant_id: str, spec: Mapping[str, Any]) -> tuple[int, int]:
    """Return a job's group and, as the forest's second feature, its project; each 0 .. 2^63 - 1.

    ======================================  ===========================================================================
    counts                                  does not
    ======================================  ===========================================================================
    tenant                                  environment (run ids and secrets are there)
    name, without its numbers               numbers and hexadecimal in the name: ``run-17``, ``2026-11-21``, ``3fa9c1``
    command line, image, working folder     checkpoint folder, progress source, layout
    labels ``kind``, ``dataset``, ``model``  other labels
    GPU model, total work and its unit      gang sizes: what is predicted is GPU seconds, whatever the gang
    ======================================  ===========================================================================

    The tenant counts, so that no user can find out how long others' jobs run by submitting their command. Within a
    group the forest distinguishes projects.

    Args:
        spec: The job's spec as JSON values; missing parts count as empty.
    """
    labels: Mapping[str, Any] = spec.get("labels") or {}
    gpus: Mapping[str, Any] = spec.get("gpus") or {}
    meta: dict[str, Any] = {
        "version": GROUP_VERSION,
        "tenant": tenant_id,
        "name": _NUMBERS.sub("#", spec.get("name") or ""),
        "command": list(spec.get("command") or ()),
        "image": spec.get("image"),
        "working_dir": spec.get("working_dir"),
        "labels": {name: labels[name] for name in LABELS if name in labels},
        "gpu_model": gpus.get("model"),
        "work": spec.get("work"),
    }
    return group_id(meta), group_id({"tenant": tenant_id, "project": spec.get("project") or "default"})
