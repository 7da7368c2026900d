"""The telemetry process: what nodes report, and what their energy emits.

``nodes`` registration, heartbeats and leases; ``ledger`` energy intervals into ledger lines, footprints and profiles
(``profiles`` is the arithmetic of one); ``intensity`` what the grid emitted while the energy was used; ``reports`` and
``invariants`` what can be asked of all that; ``retention`` how long raw lines stay.
"""
