"""Bridges to a site's existing engines: each is a process that looks like an agent to the rest."""
