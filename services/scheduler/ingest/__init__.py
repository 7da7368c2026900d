"""Turn what nodes report, or no longer report, into the state of allocations and jobs."""
