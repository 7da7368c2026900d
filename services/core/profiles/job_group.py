"""Which jobs are the same job submitted again: the parts of a stored job spec that are hashed.

=====================================  ============================================================================
counts                                 does not
=====================================  ============================================================================
tenant                                 environment (run ids and secrets are there)
name, without its numbers              numbers and hexadecimal in the name: ``run-17``, ``2026-11-21``, ``3fa9c1``
command line, image, working folder    checkpoint folder, progress source, layout
labels ``kind``, ``dataset``, ``model``  other labels
GPU model, total work and its unit     gang sizes: what is predicted is GPU seconds, whatever the gang
=====================================  ============================================================================

The tenant counts, so that no user can find out how long others' jobs run by submitting their command. Within a group
the forest distinguishes projects.

Source: A-SRPT section IV-C, 3, which hashes "user, dataset, command line and so on".
"""

import re
from collections.abc import Mapping
from typing import Any

from services.core.profiles.recurrence import group_id

GROUP_VERSION = 1
"""Raised whenever equal specs may get another group; models and history of another version are not used."""

LABELS = ("dataset", "kind", "model")
_NUMBERS = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*", re.IGNORECASE)


def job_group(tenant_id: str, spec: Mapping[str, Any]) -> tuple[int, int]:
    """Return a job's group and, as the forest's second feature, its project; each 0 .. 2^63 - 1.

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
