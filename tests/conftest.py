"""Fixtures that every room may use; each lives in a module of `tests/support`."""

import gc
import os
from collections.abc import Generator

import pytest

# Two workers whose linear algebra each takes every core wait for each other; what tests start inherits it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

pytest_plugins = [
    "tests.support.authorities",
    "tests.support.examples",
    "tests.support.folder_times",
    "tests.support.lab",
    "tests.support.order",
    "tests.support.servers",
    "tests.support.workers",
]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what is collected: modules and tests, some million objects that all stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
