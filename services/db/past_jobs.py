"""What other processes keep of a job, deleted with it when admission forgets the job."""

_OF_ALLOCATIONS = ("rank_ends", "rank_statuses", "settings_in_force", "setting_measurements", "device_claims")
_OF_JOBS = ("allocations", "job_predictions", "job_profiles", "job_progress")

FORGET_RUNS = (
    *(
        f"DELETE FROM {table} t USING allocations a "
        "WHERE a.id = t.allocation_id AND a.job_id = ANY(CAST(:ids AS text[]))"
        for table in _OF_ALLOCATIONS
    ),
    *(f"DELETE FROM {table} WHERE job_id = ANY(CAST(:ids AS text[]))" for table in _OF_JOBS),
)
"""Statements, in this order; ``ids`` are the jobs that are forgotten."""
