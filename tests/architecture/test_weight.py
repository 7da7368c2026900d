"""What the public processes and the agent load: there is one a host or more, and they pass on what others compute."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LOOK = """
import importlib, json, resource, sys
importlib.import_module(sys.argv[1])
print(json.dumps([sorted(sys.modules), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""
COMPUTES = {"numpy", "highspy", "pulp", "gurobipy", "scipy"}
MOST_MODULES = {"gateway.app": 1_000, "services.router.app": 980, "gpu_agent.app": 1_030}
"""Some 5 % above what there were when they were last counted."""
MOST_OF_A_SERVICE = 2.0
"""How many times the memory of what every service loads."""


def loaded(module: str) -> tuple[set[str], int]:
    """Return the modules that are loaded with one, and the memory of that process at most, KiB."""
    asked = [sys.executable, "-c", LOOK, module]
    answer = subprocess.run(asked, stdout=subprocess.PIPE, check=True, timeout=300)
    names, memory_kib = json.loads(answer.stdout)
    return set(names), memory_kib


@pytest.fixture(scope="module")
def service_kib() -> int:
    return loaded("services.kit.app")[1]


@pytest.mark.parametrize("process", MOST_MODULES)
def test_processes_that_pass_on_load_nothing_that_computes(process: str, service_kib: int) -> None:
    modules, memory_kib = loaded(process)
    assert not COMPUTES & modules
    assert len(modules) <= MOST_MODULES[process]
    assert memory_kib < MOST_OF_A_SERVICE * service_kib
