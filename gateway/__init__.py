"""The public API: each request that the edge lets in goes to the service that owns its route.

``routes`` is the public API as one table; ``dispatch`` answers by it, with ``forward`` carrying single requests to the
services and ``gather`` many submissions in one; ``openapi`` describes it all. Keys, rate limits and roles are checked
before, by ``services.kit.edge``.
"""
