"""FREESH (LLM serving on GPUs of several places): which instances run where, in which mode, for which requests.

``pools``: the question and its answer. ``pool_model``: equation 1 as a linear model. ``pool_planning``: solving it.
``classes``: classes of requests by length.
"""
