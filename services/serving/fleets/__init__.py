"""Fleets of GPUs and the applications on them: planned as the grid changes, and carried out one GPU at a time.

``planner`` is the loop, ``state`` what each pass of it reads. The decisions are pure: ``triggers`` says when a fleet is
planned, ``problem`` what the optimizer is asked, ``assignment`` which instance belongs on which GPU, ``steps`` what is
done next to carry a plan out. ``service`` has the use cases, ``observations`` what routers saw of requests.
"""
