"""PowerFlow: GPUs and clocks (or power limits) of elastic jobs under a limit on the cluster's power.

``allocate`` gives out GPUs by eq. 20 from what each job could have (``Choices``), and ``controls`` raises clocks or
power limits by eq. 21, both as pure functions over arrays.

Paper symbols: n and f are ``Choices.gpus`` and the last axis of ``Choices.speed`` (ascending clocks or power limits);
T_iter is 1 / ``speed``, P is ``power_w`` and E_iter is ``power_w / speed``; eta keeps its name.
"""
