"""Tests of telemetry: its HTTP API on a real database."""
