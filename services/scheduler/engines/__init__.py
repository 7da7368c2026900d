"""Jobs that an engine of the site runs: what its bridge reports is folded, and what plans want of it is sent there."""
