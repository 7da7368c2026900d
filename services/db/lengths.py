"""Actual lengths of ended jobs, in GPU seconds: lengths are predicted from them, and predictions are compared with
them.

The length of a job that reported progress is its work times the measured GPU seconds per unit, excluding starts and
what a restart repeated (``job_profiles``). That is A-SRPT's iterations times their time. If nothing was reported, or
less than half of the work was measured, it is the time for which its gangs held their GPUs once they ran; gangs that
failed or lost a node are left out, because their work since the last checkpoint was done again.
"""

AMOUNT = """
CASE WHEN f.progress > 0 AND 2 * f.progress >= p.done THEN p.done * f.gpu_s / f.progress ELSE coalesce(a.gpu_s, 0) END
"""

MEASURED = """
LEFT JOIN job_progress p ON p.job_id = j.id
LEFT JOIN LATERAL (
    SELECT sum(duration_s * gpus) AS gpu_s, sum(progress) AS progress FROM job_profiles WHERE job_id = j.id
) f ON true
LEFT JOIN LATERAL (
    SELECT sum(gpus * extract(epoch FROM ended_at - coalesce(running_at, started_at)))::float8 AS gpu_s
      FROM allocations
     WHERE job_id = j.id AND state = 'ended'
       AND end_reason NOT IN ('failed', 'out_of_memory', 'port_taken', 'node_lost', 'start_failed', 'slice_lost',
           'gpu_lost', 'node_drained', 'node_not_woken', 'installation_stopped', 'node_losses')
) a ON true
"""
"""The joins that ``AMOUNT`` needs, of a job ``j``."""

HISTORY = f"""
SELECT j.id, j.ended_at, {AMOUNT} AS gpu_s, q.group_version, q.group_id, q.user_id
  FROM jobs j LEFT JOIN job_predictions q ON q.job_id = j.id {MEASURED}
 WHERE j.state = 'succeeded' AND j.spec -> 'service' IS NULL AND (j.ended_at, j.id) > ($1, $2) AND j.ended_at <= $3
 ORDER BY j.ended_at, j.id LIMIT $4
"""
"""One page of jobs that succeeded, in the order of their ends; jobs that failed or were cancelled did not run to their
full length, and service instances have no length."""
