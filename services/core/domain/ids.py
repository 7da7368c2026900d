"""Identifiers as distinct types, so that a node's name cannot be mistaken for a job's."""

from typing import NewType

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
TenantId = NewType("TenantId", str)
AllocationId = NewType("AllocationId", str)


def allocation_id(job_id: JobId, generation: int) -> AllocationId:
    """Return the id of a job's ``generation``-th allocation; each generation is a new gang."""
    return AllocationId(f"{job_id}.{generation}")
