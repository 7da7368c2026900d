"""Commands on this installation, its hosts, nodes, policy and engines."""
