"""Serving of LLM requests in virtual time: the router's queues, the planner's plans and clocks, on simulated servers.

``requests``: traces of requests. ``rates``: intensities of the places. ``site``: what a pool's file says of its classes
and servers. ``plans``: the half hours. ``servers``: instances. ``simulation`` runs them; ``result`` says what it came
to.
"""
