"""The public API: each request that the edge lets in goes to the service that owns its route.

``routes`` is the public API as one table; ``dispatch`` answers requests by it, with ``forward`` carrying single
requests to the services and ``gather`` combining many submissions into one; ``openapi`` describes it all. Keys, rate
limits and roles are checked first, by ``services.kit.edge``.
"""
