"""How long a gang runs on before a policy may stop it, and how long a stop waits for it to save its work.

See ``services.core.policies.sparing``.
"""

import math

import numpy as np

from services.core.cycle.snapshot import QUEUED, RUNNING, Snapshot
from services.core.domain.ids import JobId

LATE = 0.25  #: By how much a gang may be late with its next save, as a share of the interval or of the longest wait


def save_wait_s(snapshot: Snapshot, job_id: JobId) -> float:
    """Return for how long the stop of a gang should wait for its next save, seconds; 0: not at all."""
    jobs, saves = snapshot.jobs, snapshot.saves.get(job_id)
    if saves is None or (at := jobs.index.get(job_id)) is None or jobs.phase[at] != RUNNING:
        return 0.0
    left_s = max(saves.last_s, jobs.waiting_since_s.item(at)) + saves.every_s - snapshot.now_s
    late_s = LATE * min(saves.every_s, snapshot.save_wait_s)
    return left_s + late_s if -late_s < left_s <= snapshot.save_wait_s else 0.0


def goes_on(snapshot: Snapshot, job_id: JobId) -> bool:
    """Whether a gang has run for less than it is guaranteed, and no job would be late if it and a round went on."""
    jobs = snapshot.jobs if snapshot.guests is None or job_id in snapshot.jobs.index else snapshot.guests
    at, now_s, run_s = jobs.index[job_id], snapshot.now_s, snapshot.min_run_s
    since_s, runs = jobs.waiting_since_s.item(at), jobs.phase[at] == RUNNING
    saves = snapshot.saves.get(job_id)
    if runs and saves is not None and saves.last_s < since_s and not save_wait_s(snapshot, job_id):
        run_s = max(run_s, saves.every_s * (1 + LATE))
    left_s = since_s + run_s - now_s if runs else run_s
    round_s = 0.0 if math.isnan(snapshot.next_active_s) else max(snapshot.next_active_s - now_s, 0.0)
    return left_s > 0 and not is_late(snapshot, left_s + round_s)


def is_late(snapshot: Snapshot, wait_s: float) -> bool:
    """Whether a waiting job would be late if a stop came so much later."""
    jobs, now_s = snapshot.jobs, snapshot.now_s
    slack_s = jobs.deadline_s - now_s - np.nan_to_num(jobs.remaining_s)
    late = (jobs.phase == QUEUED) & (jobs.deadline_s > now_s) & (slack_s < wait_s)
    return bool(late.any())
