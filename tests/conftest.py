"""Fixtures that every room may use; each lives in a module of `tests/support`."""

import os

# Two workers whose linear algebra each takes every core wait for each other; what tests start inherits it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

pytest_plugins = [
    "tests.support.examples",
    "tests.support.folder_times",
    "tests.support.lab",
    "tests.support.order",
    "tests.support.servers",
]
