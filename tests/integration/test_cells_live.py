"""Two installations, live: one is the home of the other, and its jobs run where it is cleaner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.integration.conftest import UNUSED, Installation
from tests.support.servers import scratch_folder, wait_until

SPEC: dict[str, Any] = {"command": ["sh", "-c", "echo it runs; sleep 4"], "time_limit_s": 600, "cells": ["any"]}


@pytest.fixture
def pair() -> Iterator[tuple[Installation, Installation]]:
    """A home in a dirty grid, and an installation in a clean one."""
    with ExitStack() as stack:
        found: list[Installation] = []
        for zone in ("DE", "SE"):
            folder = stack.enter_context(scratch_folder())
            each = Installation(folder, f"2x1@{zone}", without=UNUSED, ADMISSION_CELLS_POLL_S="0.5")
            stack.callback(each.down)
            each.up()
            found.append(each)
        yield found[0], found[1]


def energies(installation: Installation, by: str) -> dict[str, float]:
    lines = installation.gateway.get("/v1/reports/footprint", group_by=by)["lines"]
    return {each["group"]: each["footprint"]["energy_j"] for each in lines}


def test_a_homes_jobs_run_in_its_cell_through_kills_and_add_up(pair: tuple[Installation, Installation]) -> None:
    home, cell = pair
    cell.gateway.call("POST", "/v1/tenants", body={"id": "home"})
    key = cell.gateway.call("POST", "/v1/keys", body={"tenant_id": "home", "project": "home"})["secret"]
    home.gateway.call("POST", "/v1/cells", body={"name": "north", "url": cell.gateway.url, "key": key})
    jobs = [home.gateway.call("POST", "/v1/jobs", body={"name": f"j{at}", **SPEC})["id"] for at in range(6)]
    for installation in (home, cell):
        installation.kill("admission")

    ended = home.wait_for_ends(jobs, 120)
    assert {each["state"] for each in ended} == {"succeeded"}
    away = [each for each in ended if each["cell"] == "north"]
    copies = cell.gateway.get("/v1/jobs")["items"]
    labels = [each["spec"]["labels"]["wattshift.copy-of"].partition(".")[0] for each in copies]
    assert sorted(labels) == sorted(each["id"] for each in away) != []
    wait_until(lambda: energies(home, "node").get("cell:north") == pytest.approx(energies(cell, "tenant")["home"]))
    rules = {each["name"]: each["holds"] for each in home.gateway.get("/v1/invariants")["invariants"]}
    assert rules["no_job_in_limbo"]
    assert rules["one_gang_per_job"]
