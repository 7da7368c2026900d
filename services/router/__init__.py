"""The router: an OpenAI-compatible door in front of pools of model servers, and one for applications (``apps``).

A request comes in at the ``door``, at the level of ASGI. ``dispatch`` takes it (a ``turn``) through its steps: what is
expected of it (``expectations``), its queue (``lanes``), the request as a server gets it (``outgoing``), and the answer
on its way back, with what is learned from it and counted (``answers``, ``streams``). ``fleet`` is the routing table
with what is known of each server, ``upstream`` is the HTTP client, ``openai`` has the shapes of requests and errors.
``table``, ``reports``, ``latency`` and ``peers`` exchange messages with other processes in the background.
"""
