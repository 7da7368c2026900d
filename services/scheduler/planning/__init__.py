"""A round: the live state as a snapshot, the policy's plan, and the one transaction that carries it out."""
