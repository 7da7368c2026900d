"""Fixtures that every room may use; each lives in a module of `tests/support`."""

pytest_plugins = ["tests.support.folder_times", "tests.support.order", "tests.support.servers"]
