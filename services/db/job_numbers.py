"""Numbers of jobs and arrays, which count within a tenant: ``tenants.last_number`` is the newest."""

TAKEN = """
UPDATE tenants SET last_number = last_number + cardinality({ids}) WHERE id = {tenant_id}
RETURNING last_number - cardinality({ids}) AS before
"""
"""Takes a number for each of some new jobs: those after ``before``. The tenant stays locked until the commit."""
