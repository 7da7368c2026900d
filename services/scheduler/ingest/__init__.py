"""What nodes report, and no longer report, becomes the state of allocations and jobs."""
