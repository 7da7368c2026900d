"""The telemetry process: what nodes report, and the emissions of their energy.

``nodes`` has registration, heartbeats and leases; ``ledger`` turns energy intervals into ledger lines, footprints and
profiles; ``intensity`` is the grid's intensity while the energy was used;
``reports`` are the queries on all this; ``retention`` says how long raw lines are kept.
"""
