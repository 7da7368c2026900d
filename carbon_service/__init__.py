"""The process that knows how dirty the grid is: providers, their history in Postgres, forecasts, and replay.

A *source* is one signal of one zone from one provider. The poller fetches every source and stores what it learns; the
API answers from the store alone, so that a provider's outage is a matter of staleness and never of availability.
"""
