"""Fixtures that every room may use; each lives in a module of `tests/support`."""
