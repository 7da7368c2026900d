"""The router: an OpenAI-compatible door in front of pools of model servers, and one for applications (``apps``).

A request comes in at the ``door``, at the level of ASGI. ``dispatch`` takes it (a ``turn``) through its steps: what is
expected of it (``expectations``, ``tokens``), its queue (``lanes``), the request as a server gets it (``outgoing``),
the answer on its way back (``answers``, ``streams``), and what is learned from it and counted (``outcomes``). ``fleet``
is the routing table with what is known of each server, ``upstream`` is the HTTP client, ``openai`` has the shapes of
requests and errors. ``table``, ``traffic``, ``usage``, ``latency`` and ``peers`` exchange messages with other processes
in the background.
"""
