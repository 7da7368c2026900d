"""The carbon service: providers against a real peer, the store on a real PostgreSQL, the API as its callers see it."""
