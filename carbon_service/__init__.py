"""The process for the grid's carbon intensity: providers, their history in Postgres, forecasts, and replay.

A *source* is one signal of one zone from one provider. The poller fetches every source and stores the values; the API
answers only from the store, so that a provider's outage makes values stale but the API stays available.
"""
