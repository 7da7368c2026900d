"""Sums of Prometheus metrics that another process shows."""

from __future__ import annotations

import math
from collections.abc import Collection

from prometheus_client.parser import text_string_to_metric_families


def metric_sum(metrics: str, names: Collection[str]) -> float | None:
    """Return the sum of these metrics over all their labels; None if none is there, or one is not a number.

    Args:
        metrics: Prometheus text format, version 0.0.4.
    """
    wanted = tuple(names)
    # The others, of which a server may have megabytes, are not parsed.
    lines = "".join(f"{line}\n" for line in metrics.split("\n") if line.startswith(wanted))
    try:
        families = list(text_string_to_metric_families(lines))
    except ValueError:
        return None
    found = [sample.value for family in families for sample in family.samples if sample.name in names]
    total = sum(found)
    return total if found and math.isfinite(total) else None
