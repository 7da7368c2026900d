"""Specs of array tasks, as SQL: a task is stored with the spec of its array."""

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
