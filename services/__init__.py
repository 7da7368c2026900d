"""The control plane's libraries and processes; see docs/architecture.md for the map."""
