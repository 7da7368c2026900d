"""Commands for this installation, its hosts, nodes, policy and engines."""
