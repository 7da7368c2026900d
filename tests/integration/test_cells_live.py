"""Two installations, live: one is the home of the other, and its jobs run where it is cleaner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import UNUSED, Installation
from tests.support.servers import scratch_folder, wait_until

SPEC: dict[str, Any] = {"command": ["sh", "-c", "echo it runs; sleep 4"], "time_limit_s": 600, "cells": ["any"]}
GOES_ON = """
if [ -e {0}/saved ]; then sleep 4; exit; fi
trap 'touch {0}/saved; exit 1' TERM
while true; do echo '{{"done": 2}}' >> $WATTSHIFT_PROGRESS_FILE; sleep 1; done
"""
"""Has done two per cent until it is stopped, and then all of it where it finds what it has saved."""


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Installation, Installation]]:
    """A home in one grid, and an installation in another, that is its cell; how often home asks it again, seconds."""
    zones, again_s = request.param
    with ExitStack() as stack:
        found: list[Installation] = []
        for zone in zones:
            folder = stack.enter_context(scratch_folder())
            often = {"ADMISSION_CELLS_POLL_S": "0.5", "ADMISSION_CELLS_AGAIN_S": again_s}
            each = Installation(folder, f"2x1@{zone}", without=UNUSED, **often)
            stack.callback(each.down)
            each.up()
            found.append(each)
        home, cell = found
        cell.gateway.call("POST", "/v1/tenants", body={"id": "home"})
        key = cell.gateway.call("POST", "/v1/keys", body={"tenant_id": "home", "project": "home"})["secret"]
        home.gateway.call("POST", "/v1/cells", body={"name": "north", "url": cell.gateway.url, "key": key})
        yield home, cell


def energies(installation: Installation, by: str) -> dict[str, float]:
    lines = installation.gateway.get("/v1/reports/footprint", group_by=by)["lines"]
    return {each["group"]: each["footprint"]["energy_j"] for each in lines}


def hold_what_must(home: Installation) -> None:
    rules = {each["name"]: each["holds"] for each in home.gateway.get("/v1/invariants")["invariants"]}
    assert rules["no_job_in_limbo"]
    assert rules["one_gang_per_job"]


@pytest.mark.parametrize("pair", [(("DE", "SE"), "300")], indirect=True)
def test_a_homes_jobs_run_in_its_cell_through_kills_and_add_up(pair: tuple[Installation, Installation]) -> None:
    home, cell = pair
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
    hold_what_must(home)


@pytest.mark.parametrize("pair", [(("SE", "DE"), "2"), (("DE", "SE"), "2")], ids=["home", "away"], indirect=True)
def test_a_job_that_runs_moves_through_kills_once_there_is_room_where_it_is_cleaner(
    pair: tuple[Installation, Installation], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The cleaner one is full at first."""
    home, cell = pair
    dirtier, cleaner = (cell, home) if request.node.callspec.id == "home" else (home, cell)
    places = {home: None, cell: "north"}
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    stays = {"command": ["sleep", "900"], "time_limit_s": 3_600, "preemptible": False}
    full = [cleaner.gateway.call("POST", "/v1/jobs", body={"name": f"f{at}", **stays})["id"] for at in range(2)]
    for each in full:
        cleaner.wait_for(each, lambda job: job["state"] == "running")
    moves = {
        "name": "moves",
        "command": ["sh", "-c", GOES_ON.format(tmp_path)],
        "cells": ["any"],
        "may_move": True,
        "checkpoint_dir": str(tmp_path),
        "work": {"total": 100, "unit": "steps"},
        "progress": {"source": "file"},
        "flexibility_s": 0,
        "max_restarts": 0,
    }
    job_id = home.gateway.call("POST", "/v1/jobs", body=moves)["id"]
    home.wait_for(job_id, lambda job: job["state"] == "running" and job["progress"] and job["footprint"]["energy_j"])
    assert home.job(job_id)["cell"] == places[dirtier]
    for each in full:
        cleaner.gateway.call("POST", f"/v1/jobs/{each}/cancel")

    here = job_id if dirtier is home else cell.gateway.get("/v1/jobs")["items"][0]["id"]
    dirtier.wait_for(here, lambda job: job["state"] not in ("starting", "running"), 120)
    for installation in (home, cell):
        installation.kill("admission")
    (ended,) = home.wait_for_ends([job_id], 180)
    assert (ended["state"], ended["cell"]) == ("succeeded", places[cleaner]), ended["detail"]
    assert len([each for each in cell.gateway.get("/v1/jobs")["items"] if each["name"] == "moves"]) == 1
    used_there = energies(cell, "tenant")["home"]
    wait_until(lambda: energies(home, "node").get("cell:north") == pytest.approx(used_there))
    wait_until(lambda: home.job(job_id)["footprint"]["energy_j"] > used_there)  # the last interval comes a second later
    hold_what_must(home)
