"""Which jobs an engine's bridge would hold, until when and for what; and what of a site's work it can steer at all."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.cli.site import engines as cli
from services.contracts.engines import EngineAction, EngineMode
from services.contracts.identity import Identity, Role
from services.kit.bridges.figures import IDLED
from services.kit.problems import install_problem_handlers
from services.scheduler import engine_endpoints
from tests.engines.bridge import Bridge, a_job, on
from tests.engines.test_savings import HOUR_S, until_green
from tests.engines.test_slurm_arrays import GREENER, Site
from tests.scheduler.world import World
from tests.support.tokens import ActingAs

pytestmark = pytest.mark.usefixtures("the_lab")


async def asked(world: World, *paths: str) -> list[httpx.Response]:
    """Return the answers to an operator who asks for jobs of an engine."""
    app = FastAPI()
    install_problem_handlers(app)
    app.include_router(engine_endpoints.router)
    app.state.database = world.database
    transport = httpx.ASGITransport(ActingAs(app, Identity(tenant_id="default", role=Role.OPERATOR, key_id="key-1")))
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler") as api:
        return [await api.get(f"/v1/engines/{path}") for path in paths]


@pytest.mark.parametrize("mode", [EngineMode.DRY_RUN, EngineMode.CONTROL])
async def test_operators_see_what_would_wait_until_when_and_what_it_saves(world: World, mode: EngineMode) -> None:
    now = datetime.now(UTC)
    green_s = (now.timestamp() // HOUR_S + 5) * HOUR_S
    await until_green(world, green_s)
    bridge = Bridge(world, mode)
    await bridge.enrol(nodes=1)
    shell = a_job("4", "running", steered=False, why_not="it is interactive", gpus=1, shares=[on("g1", 3)])
    began = shell.model_copy(update={"started_at": now - timedelta(hours=2)})
    limit = {"blocked": "QOSMaxGRESPerUser", "submitted_at": now}
    await bridge.say(a_job("1", time_limit_s=3_600, submitted_at=now), a_job("2", time_limit_s=3_600, **limit), began)
    await bridge.say(a_job("5", "running", gpus=2, shares=[on("g1", 1, 2)], started_at=now - timedelta(hours=3)))

    answers = await asked(world, "slurm/jobs", "slurm/jobs?held=true", "other/jobs")

    assert [answer.status_code for answer in answers] == [200, 200, 404]
    found, held = answers[0].json(), answers[1].json()
    assert [each["number"] for each in found["items"]] == ["1", "2"]
    assert held["items"] == found["items"][:1]
    waits, blocked = found["items"]
    assert datetime.fromisoformat(waits["held_until"]).timestamp() == green_s
    assert waits["saves_gco2"] > 0
    assert (blocked["waits_for"], blocked["held_until"], blocked["saves_gco2"]) == ("QOSMaxGRESPerUser", None, None)
    assert [(each["why_not"], round(each["gpu_h"], 1)) for each in found["hours"]] == [
        ("", 6.0),
        ("it is interactive", 2.0),
    ]
    assert cli._steerable(found["hours"]) == [
        "75% of 8 GPU hours in the last 7 days can be steered; left alone: 25% it is interactive"
    ]
    table: Any = cli._jobs_table(found["items"])
    cells = [list(column.cells) for column in table.columns]
    assert (cells[0], cells[-1]) == (["1", "2"], ["a greener hour", "QOSMaxGRESPerUser"])
    assert [bool(cell) for cell in cells[7]] == [True, False], "what it saves"
    await until_green(world, now.timestamp() - HOUR_S)
    await bridge.say()
    (answer,) = await asked(world, "slurm/jobs?held=true")
    assert answer.json()["items"] == [], "the hour is green"
    assert cli._steerable([]) == []


def idled(reason: str) -> float:
    """Return the GPU seconds counted so far."""
    return IDLED.labels(reason)._value.get()


async def test_gpus_that_are_free_beside_held_jobs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs, of which six are held by a job: two are free beside jobs that want four."""
    site = Site()
    clock_s = time.time()
    monkeypatch.setattr("services.engines.slurm.bridge.time.time", lambda: clock_s)
    array = site.slurm.submit("0-1")
    site.slurm.start(site.slurm.submit("0-1"), 0, 0, 1, 2, 3, 4, 5)
    site.slurm.rows[-2]["job_state"] = "CANCELLED"
    await site.look()
    before = idled("greener_hours"), idled("other")
    for task in range(2):
        site.plane.decide(f"{array}_{task}", EngineAction.HOLD, **GREENER)
    await site.look(1)
    await site.look(1)
    clock_s += 10
    await site.look(1)
    assert (idled("greener_hours") - before[0], idled("other") - before[1]) == (20, 0)
    for task in range(2):
        site.plane.decide(f"{array}_{task}", EngineAction.HOLD, note="waits:size")
    await site.look(1)
    clock_s += 10
    await site.look(1)
    assert (idled("greener_hours") - before[0], idled("other") - before[1]) == (20, 20)
