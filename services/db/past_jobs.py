"""Jobs as reports know them: present ones, and what is kept of those that ended long ago.

Admission moves what is kept to ``past_jobs`` when it forgets a job; the ledger's lines continue to name it.
"""

REPORTED_JOBS = """(
    SELECT i.id, i.tenant_id, i.project, i.name, i.state, i.user_id, i.labels ->> 'user' AS user_label, i.array_id,
           NULL AS array_name, i.spec -> 'work' ->> 'unit' AS work_unit, p.done AS work_done
      FROM jobs i LEFT JOIN job_progress p ON p.job_id = i.id
    UNION ALL
    SELECT id, tenant_id, project, name, state, user_id, user_label, array_id, array_name, work_unit, work_done
      FROM past_jobs
)"""
"""A table expression, one row per job."""
