"""What a bridge shows at ``/metrics``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.contracts.engines import EngineAction, EngineDecision, EngineJob, EngineJobState, EngineMode, EngineReport
from services.kit.bridges.figures import BridgeFigures, shown_at
from services.kit.ids import utc_now
from services.kit.metrics import REGISTRY, Metrics
from tests.support.ports import Ports
from tests.support.servers import ROOT, wait_until
from tests.support.services import services

PAGE = ROOT / "docs" / "metrics.md"


def a_job(name: str, state: EngineJobState, **fields: object) -> EngineJob:
    given = {"number": "1", "name": "train", "user": "u", "steered": True, "gpus": 1, "submitted_at": utc_now()}
    return EngineJob.model_validate({"external_id": name, "state": state, **given, **fields})


def report(*jobs: EngineJob, problem: str | None = None) -> EngineReport:
    return EngineReport(boot_id="b", kind="slurm", mode=EngineMode.CONTROL, jobs=list(jobs), problem=problem)


def decision(name: str, revision: int, action: EngineAction = EngineAction.HOLD) -> EngineDecision:
    return EngineDecision(external_id=name, revision=revision, action=action)


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def shown(metrics: Metrics) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    ports = Ports()
    address = f"127.0.0.1:{ports.take(29_400)}"
    async with shown_at(address, metrics), aiohttp.ClientSession() as session:
        yield session, f"http://{address}/metrics"
    ports.release()


async def test_jobs_decisions_and_their_time_are_shown() -> None:
    now_s = 100.0
    metrics = Metrics(CollectorRegistry(), clock_s=lambda: now_s)
    figures = BridgeFigures(metrics, clock_s=lambda: now_s)
    before = counted("wattshift_engine_decisions_total", action="hold"), counted("wattshift_engine_refusals_total")
    taken_s = counted("wattshift_engine_decision_seconds_sum")
    figures.note_report(report(a_job("a", EngineJobState.PENDING), a_job("b", EngineJobState.RUNNING)))
    figures.note_decisions([decision("a", 3), decision("b", 4)])
    figures.note_decisions([decision("a", 3)])  # repeated
    now_s += 5
    figures.note_report(report(a_job("a", EngineJobState.PENDING, revision=3)))
    figures.note_report(report(a_job("b", EngineJobState.RUNNING, refused="no")))
    figures.note_report(report(a_job("b", EngineJobState.RUNNING, refused="no")))

    async with shown(metrics) as (session, url), session.get(url) as answer:
        text = await answer.text()

    shown_names = set(re.findall(r"^# TYPE (wattshift_engine_\w+)", text + generate_latest(REGISTRY).decode(), re.M))
    assert set(re.findall(r"wattshift_engine_\w+", PAGE.read_text())) == shown_names
    for line in ('jobs{state="pending"} 1.0', 'jobs{state="running"} 1.0', "up 1.0", "decisions_pending 1.0"):
        assert f"wattshift_engine_{line}" in text
    assert counted("wattshift_engine_decisions_total", action="hold") == before[0] + 2
    assert counted("wattshift_engine_refusals_total") == before[1] + 1
    assert counted("wattshift_engine_decision_seconds_sum") == pytest.approx(taken_s + 5)


async def test_a_decision_that_comes_after_its_job_has_ended_is_not_pending_for_ever() -> None:
    metrics = Metrics(CollectorRegistry())
    figures = BridgeFigures(metrics)
    figures.note_report(report(a_job("a", EngineJobState.PENDING), a_job("b", EngineJobState.PENDING)))
    figures.note_report(report(a_job("a", EngineJobState.CANCELLED)))
    figures.note_decisions([decision("a", 3), decision("b", 4)])

    figures.note_report(report().model_copy(update={"present": ["b"]}))

    assert "wattshift_engine_decisions_pending 1.0" in (await metrics.text()).decode()


async def test_jobs_that_are_over_and_an_engine_that_is_silent_are_not_counted() -> None:
    metrics = Metrics(CollectorRegistry())
    figures = BridgeFigures(metrics)
    assert "wattshift_engine_up" not in [line.split(" ")[0] for line in (await metrics.text()).decode().split("\n")]
    figures.note_report(report(a_job("a", EngineJobState.RUNNING)))
    figures.note_report(report(a_job("a", EngineJobState.FAILED)))
    figures.note_report(report(problem="slurmctld is away"))

    text = (await Metrics.text(fresh(figures))).decode()

    assert 'wattshift_engine_jobs{state="running"} 0.0' in text
    assert "wattshift_engine_up 0.0" in text


def fresh(figures: BridgeFigures) -> Metrics:
    """Return the same figures, read anew."""
    metrics = Metrics(CollectorRegistry())
    metrics.add("engine", figures._read)
    return metrics


def test_the_process_of_a_bridge_shows_them_where_it_is_told_to(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Its Slurm is not there, which is what it says."""
    ports = Ports()
    address = f"127.0.0.1:{ports.take(29_400)}"
    with (
        services(tmp_path, database_url, redis_url, WATTSHIFT_NODE_JOIN_TOKEN="x" * 32) as found,
        found.started("services.telemetry.app", TELEMETRY_JOIN_TOKEN="x" * 32),
    ):
        environment = found.environment | {
            "ENGINE_SLURM_METRICS_ADDRESS": address,
            "PATH": str(Path(sys.executable).parent),
        }
        command = [sys.executable, "-m", "services.engines.slurm.app"]
        with subprocess.Popen(command, cwd=ROOT, env=environment) as bridge:
            try:
                wait_until(lambda: "wattshift_engine_up 0.0" in _text(address))
                assert 'wattshift_engine_reports_total{outcome="taken"}' in _text(address)
            finally:
                bridge.terminate()
    ports.release()
    assert bridge.returncode == 0


def _text(address: str) -> str:
    try:
        return httpx.get(f"http://{address}/metrics").text
    except httpx.TransportError:
        return ""
