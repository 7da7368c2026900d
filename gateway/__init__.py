"""The process at the public edge: it knows who asks and how often, and hands each request to the service that owns it.

``routes`` is the public API as one table; ``edge`` takes a request through it; ``keys`` and ``limits`` say who may
and how often; ``forward`` carries requests to services, ``gather`` many submissions in one; ``openapi`` describes it
all.
"""
