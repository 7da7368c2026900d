"""Sia's 13 published workloads, whole, through reader and recipe; they state no licence, so they are not bundled."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from services.simulator.readers.jobs import read_jobs

FOLDER = os.environ.get("SIA_WORKLOADS")
"""Of https://github.com/siasosp23/artifacts at aaf7a0d: ``sia-simulator/workloads``, or its ``philly`` and the
first five of ``newtrace``."""


@pytest.mark.skipif(not FOLDER, reason="SIA_WORKLOADS names no folder with Sia's workloads, which are not bundled")
def test_all_jobs_of_the_published_workloads_are_taken() -> None:
    jobs = Counter(len(read_jobs(file, start=0.0)) for file in Path(FOLDER or "").rglob("*.csv"))

    assert jobs >= Counter({160: 8, 960: 5})
    assert jobs.keys() == {160, 960}
