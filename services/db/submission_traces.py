"""The traces and requests of submissions, to which later work on their jobs belongs."""

TRACEPARENTS = """
SELECT job_id, data ->> 'traceparent' AS traceparent FROM job_events
 WHERE job_id = ANY($1::text[]) AND type = 'job.submitted' AND data ->> 'traceparent' IS NOT NULL
"""
