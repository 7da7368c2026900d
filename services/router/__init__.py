"""The router: an OpenAI-compatible door in front of pools of model servers.

``door`` takes a request through its steps, at the level of ASGI. ``fleet`` is the routing table with what is known of
each server, ``lanes`` are the queues in front of them, ``upstream`` is the HTTP client. ``openai`` has the shapes of
requests and errors, ``tokens`` and ``lengths`` what is expected of a request. ``table``, ``traffic``, ``usage``,
``latency`` and ``peers`` exchange messages with other processes in the background.
"""
