"""The agent against real processes, a real Valkey, and a small server in the place of telemetry."""
