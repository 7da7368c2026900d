"""What a job would do in another configuration: step time and energy, learned from what it did in a few.

``observations`` holds measured points, merged by configuration, and rejects nonsense; ``throughput`` has PowerFlow's
two models as array functions; ``fitting`` is the bounded least squares beneath both; ``learn`` fits them and says how
good the fit is; ``boards`` and ``priors`` describe GPU models and families of jobs before the first point; ``profile``
is what is believed of one job, fitted to its points.
``goodput`` is Pollux' model: how fast a training job progresses at each batch size, and the best one.
``prefix_cache`` is what a server of LLM requests has read before; ``traffic`` predicts the peak rate of each class of
them.

A *control* is what slows a board down to save power: a clock in MHz, or a power limit in W where clocks cannot be set.
"""
