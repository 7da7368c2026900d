"""The bridge to Kueue: an AdmissionCheck controller, ``python -m services.engines.kueue.app``.

Kueue handles quota, fairness and placement; we say when a workload with quota is admitted, and which one is evicted for
a greener hour. ``reading`` knows Kueue's resources and ``steering`` their wanted state, both pure; ``cluster`` talks to
the API server and ``bridge`` is the loop.
"""
