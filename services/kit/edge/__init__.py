"""What every public process does before it answers: it recognises the caller and counts the request.

``edge`` takes a request through a table of routes, ``exchange`` and ``bodies`` are requests and answers at the level of
ASGI, ``keys`` identifies the caller, ``limits`` limits its rate, ``matching`` finds the route of a path, and
``settings`` are those that public processes share. What happens after that is up to the process.
"""
