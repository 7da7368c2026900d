"""Jobs that an engine of the site runs: the reports of its bridge are folded, and what plans want is sent to it."""
