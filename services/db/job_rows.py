"""SQL on rows of jobs that other processes than admission need: numbers, traces, whole specs, what goes with a job."""

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
"""Statements, in this order, that delete what other processes keep of jobs; ``ids`` are the jobs to forget."""


TAKEN = """
UPDATE tenants SET last_number = last_number + cardinality({ids}) WHERE id = {tenant_id}
RETURNING last_number - cardinality({ids}) AS before
"""
"""Takes a number for each of some new jobs: those after ``before``. The tenant stays locked until the commit."""


TRACEPARENTS = """
SELECT job_id, data ->> 'traceparent' AS traceparent FROM job_events
 WHERE job_id = ANY($1::text[]) AND type = 'job.submitted' AND data ->> 'traceparent' IS NOT NULL
"""
"""The traces and requests of submissions, to which later work on their jobs belongs."""

SPEC_TO_RUN = """
CASE WHEN j.array_id IS NULL THEN j.spec ELSE (
    SELECT jsonb_set(j.spec, '{environment}', coalesce(j.spec -> 'environment', '{}') || jsonb_build_object(
        'WATTSHIFT_ARRAY_ID', a.id, 'WATTSHIFT_ARRAY_INDEX', j.array_index::text,
        'WATTSHIFT_ARRAY_COUNT', a.tasks::text, 'WATTSHIFT_ARRAY_FIRST', a.first_index::text,
        'WATTSHIFT_ARRAY_LAST', a.last_index::text))
    FROM job_arrays a WHERE a.id = j.array_id)
END
"""
"""The whole spec as nodes get it: that of a task of an array with the variables that tell it which task it is."""
