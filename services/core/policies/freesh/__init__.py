"""FREESH (LLM serving on GPUs in several places): which instances run where, which request is next, at which clock.

Every half hour: ``pools`` is the problem and its plan, ``pool_model`` equation 1 as a linear model, ``pool_planning``
its solution. Every request: ``classes`` by length, ``laxity`` and ``request_queue`` for their order, ``dispatch`` for
their instance. Every second: ``miad`` for clocks that follow latency, ``clock_model`` for those that are learned.
"""
