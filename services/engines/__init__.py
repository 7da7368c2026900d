"""Bridges to engines that a site has: each is a process that looks like an agent to the rest."""
