"""All SQL of telemetry, by subject; queries return typed rows, commands change rows in the caller's transaction.

``nodes`` has registrations, heartbeats and leases; ``energy`` the ledger's lines and the sums kept with them; ``lines``
the ledger as one table; ``reports`` sums over it; ``jobs`` past jobs and their tenants; ``rules`` the queries whose
rows each break a rule; ``retention`` combines old lines.
"""
