"""The telemetry process: what nodes report, and what their energy emits.

``nodes`` registration, heartbeats and leases; ``ledger`` energy intervals into ledger lines, footprints and profiles
(``profiles`` is the arithmetic of one); ``intensity`` the grid's intensity while the energy was used; ``reports`` and
``invariants`` the queries on all this; ``retention`` how long raw lines are kept.
"""
