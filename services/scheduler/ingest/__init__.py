"""Turn what nodes report, and no longer report, into the state of allocations and jobs."""
