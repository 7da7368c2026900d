"""What jobs still need, and by when."""

from __future__ import annotations

import numpy as np

from services.core.cycle.snapshot import JobTable
from services.core.domain.arrays import Floats, Ints


def left_and_due_s(jobs: JobTable, which: Ints, *, unknown_s: float, window_s: float) -> tuple[Floats, Floats]:
    """Return what jobs still need, seconds, and when they are due to end, UTC seconds; (n_which,) each.

    Args:
        jobs: The table.
        which: (n_which,) rows of it.
        unknown_s: What a job without a prediction is assumed to need.
        window_s: How much later a job without a deadline may end than if it had run at once.
    """
    remaining_s, progress, due_s = jobs.remaining_s[which], jobs.progress[which], jobs.deadline_s[which]
    left_s = np.where(np.isnan(remaining_s), unknown_s, remaining_s)
    done = np.where(np.isnan(progress), 0.0, np.minimum(np.maximum(progress, 0.0), 0.999))
    whole_s = left_s / (1.0 - done)
    return left_s, np.where(np.isfinite(due_s), due_s, jobs.submitted_s[which] + whole_s + window_s)
