"""What exists: jobs, gangs, nodes, placements, carbon curves; their ids, units and errors."""
