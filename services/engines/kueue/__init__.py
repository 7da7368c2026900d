"""The bridge to Kueue: an AdmissionCheck controller, ``python -m services.engines.kueue.app``.

Kueue keeps quota and fairness, and places; we say when a workload with quota is admitted, and which one is evicted for
a greener hour. ``reading`` knows Kueue's resources and ``steering`` what they are to be, both pure; ``cluster`` talks
to the API server and ``bridge`` is the loop.
"""
