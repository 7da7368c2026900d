"""The figures of a real installation, in Debian's Prometheus: they are there, and every query of ours finds them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from tests.support.control_plane import eventually
from tests.support.debian import needs_program
from tests.support.ports import Ports
from tests.support.servers import ROOT, fresh_database, scratch_folder

RULES = ROOT / "deploy" / "prometheus"
BOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
OURS = re.compile(r"\bwattshift_[a-z0-9_]+")


@dataclass
class Scraped:
    """An installation, and the Prometheus that watches it."""

    stack: Stack
    http: httpx.AsyncClient
    admin: dict[str, str]
    url: str

    async def ask(self, path: str, **params: str) -> Any:
        """Return what Prometheus answers; an error of a query fails the test."""
        answer = await self.http.get(f"{self.url}/api/v1/{path}", params=params)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    async def values(self, query: str) -> list[float]:
        found = (await self.ask("query", query=query))["result"]
        return [float(each["value"][1]) for each in found]

    async def text(self, headers: dict[str, str] | None = None, query: str = "") -> httpx.Response:
        return await self.http.get(f"{self.stack.gateway_url}/metrics{query}", headers=headers or self.admin)


@contextmanager
def prometheus(folder: Path, gateway_url: str, key: str) -> Iterator[str]:
    """Run Prometheus on our own configuration, faster, and yield its address."""
    program = needs_program("prometheus", "prometheus")
    config = yaml.safe_load((RULES / "prometheus.yml").read_text())
    for job in config["scrape_configs"]:
        job |= {"scrape_interval": "3s", "scrape_timeout": "3s"}
        job["static_configs"] = [{"targets": [gateway_url.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yml").write_text((RULES / "alerts.yml").read_text())
    (folder / "wattshift.key").write_text(key)
    ports = Ports()
    url = f"http://127.0.0.1:{ports.take(29_090)}"
    command = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={url.removeprefix('http://')}"], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield url
        finally:
            process.terminate()
            process.wait(20)
            ports.release()


@pytest.fixture(scope="module")
async def scraped(postgres_url: str, redis_url: str) -> AsyncIterator[Scraped]:
    needs_program("prometheus", "prometheus")
    env = {"DATABASE_URL": fresh_database(postgres_url), "REDIS_URL": redis_url, "GATEWAY_KEY_MAX_AGE_S": "0.01"}
    with scratch_folder() as data:
        async with (
            Stack(data, nodes="1x2@DE", env=env, services=SERVICES, workers=()) as stack,
            httpx.AsyncClient(timeout=30) as http,
        ):
            key = (stack.folder.path / "admin.key").read_text().strip()
            watching = data / "prometheus"
            watching.mkdir()
            with prometheus(watching, stack.gateway_url, key) as url:
                found = Scraped(stack, http, {"authorization": f"Bearer {key}"}, url)
                await eventually(lambda: is_up(found))
                yield found


async def is_up(scraped: Scraped) -> bool:
    try:
        is_ready = (await scraped.http.get(f"{scraped.url}/-/ready")).is_success
        return is_ready and await scraped.values('count(up{job=~"wattshift.*"} == 1)') == [2.0]
    except httpx.HTTPError:
        return False


def queries() -> dict[str, str]:
    """Return every query of the alerts and boards, by where it stands."""
    alerts = yaml.safe_load((RULES / "alerts.yml").read_text())
    found = {rule["alert"]: rule["expr"] for group in alerts["groups"] for rule in group["rules"]}
    for path in BOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = target["expr"]
    return found


def named_in(text: str) -> set[str]:
    """Return the figures that a text names; those of bridges, which are not here, are in tests/engines."""
    return {name for name in OURS.findall(text) if not name.startswith("wattshift_engine_")}


def without_suffix(name: str) -> str:
    """Return the family of a sample of a histogram."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


async def test_every_query_of_the_alerts_and_boards_finds_its_figures(scraped: Scraped) -> None:
    targets = await scraped.ask("targets/metadata")
    known = {each["metric"] for each in targets}
    asked = queries()

    missing = {
        where: names
        for where, query in asked.items()
        if (names := {name for name in named_in(query) if name not in known and without_suffix(name) not in known})
    }
    for query in asked.values():
        await scraped.ask("query", query=query)

    assert len(asked) > 60
    assert missing == {}


OF_A_DAY = ("wattshift_saved_", "wattshift_savings_")  #: Of a day that is over and was replayed: there is none yet


async def test_what_we_name_in_pages_is_there(scraped: Scraped) -> None:
    known = {each["metric"] for each in await scraped.ask("targets/metadata")}
    page = (ROOT / "docs" / "metrics.md").read_text()

    named = named_in(page) - {"wattshift_process_"}
    there = {name for name in named if not name.startswith(OF_A_DAY)}
    assert {name for name in there if without_suffix(name) not in known} == set()
    shown = {name for name in known if name.startswith("wattshift_") and "_process_" not in name}
    assert shown - named == set(), "docs/metrics.md leaves them out"


async def test_every_process_answers_and_says_who_it_is(scraped: Scraped) -> None:
    up = (await scraped.ask("query", query="wattshift_service_up"))["result"]

    services = {each["metric"]["service"]: each["value"][1] for each in up}
    assert services == dict.fromkeys([service.name for service in SERVICES] + ["agent"], "1")
    assert {each["metric"]["instance"] for each in up if each["metric"]["service"] == "agent"} == {"node-1"}
    assert await scraped.values("min(wattshift_metrics_source_up)") == [1.0]


async def test_a_job_is_seen_from_the_queue_to_the_ledger(scraped: Scraped) -> None:
    spec = {"name": "seen", "project": "birds", "command": ["sleep", "600"]}
    answer = await scraped.http.post(f"{scraped.stack.gateway_url}/v1/jobs", headers=scraped.admin, json=spec)
    assert answer.is_success, answer.text

    async def shows(query: str) -> bool:
        return any(value > 0 for value in await scraped.values(query))

    for query in (
        'wattshift_jobs{state="running"}',
        'wattshift_job_wait_seconds_count{gang="first"}',
        'wattshift_scheduler_actions_total{action="start"}',
        'wattshift_device_power_watts{node="node-1",gpu="1"}',
        'wattshift_node_lease_seconds{node="node-1",zone="DE"}',
        'wattshift_energy_joules_total{project="birds",zone="DE"}',
        'wattshift_carbon_grams_total{project="birds",zone="DE"}',
        'wattshift_carbon_intensity_grams_per_kwh{zone="DE"}',
        'wattshift_submissions_total{status="201"}',
        'wattshift_http_request_duration_seconds_count{service="gateway",route="/v1/jobs"}',
        'wattshift_database_pool_connections{service="admission",state="idle"}',
        'wattshift_agent_gangs{instance="node-1"}',
    ):
        await eventually(lambda query=query: shows(query))
    await scraped.http.post(f"{scraped.stack.gateway_url}/v1/jobs/{answer.json()['id']}/cancel", headers=scraped.admin)
    await eventually(lambda: shows('wattshift_gangs_ended_total{job="cancelled"}'))


async def test_the_ledger_and_the_figures_agree(scraped: Scraped) -> None:
    async def agree() -> bool:
        answer = await scraped.http.get(
            f"{scraped.stack.gateway_url}/v1/reports/footprint?group_by=tenant", headers=scraped.admin
        )
        said = answer.json()["total"]["energy_j"]
        counted = await scraped.values("sum(wattshift_energy_joules_total)")
        return bool(counted) and said > 0 and abs(counted[0] - said) < 0.05 * said

    await eventually(agree)


async def test_figures_are_for_operators(scraped: Scraped) -> None:
    made = await scraped.http.post(
        f"{scraped.stack.gateway_url}/v1/keys", headers=scraped.admin, json={"tenant_id": "default", "role": "user"}
    )
    user = {"authorization": f"Bearer {made.json()['secret']}"}

    statuses = [(await scraped.text(headers)).status_code for headers in ({"authorization": "none"}, user)]

    assert statuses == [401, 403]
    assert (await scraped.text(query="?agents=perhaps")).status_code == 422


@pytest.mark.parametrize(("check", "file"), [("rules", "alerts.yml"), ("config", "prometheus.yml")])
def test_promtool_finds_our_files_right(tmp_path: Path, check: str, file: str) -> None:
    promtool = needs_program("promtool", "prometheus")
    (tmp_path / "wattshift.key").write_text("key")
    for path in RULES.glob("*.yml"):
        (tmp_path / path.name).write_text(path.read_text())

    done = subprocess.run([promtool, "check", check, file], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("query", ["", "?agents=true"])
async def test_promtool_finds_names_and_units_right(scraped: Scraped, query: str) -> None:
    command = [needs_program("promtool", "prometheus"), "check", "metrics"]
    text = (await scraped.text(query=query)).text

    done = await asyncio.to_thread(subprocess.run, command, input=text, capture_output=True, text=True, check=False)

    assert [line for line in (done.stdout + done.stderr).splitlines() if line and not EXCUSED.search(line)] == []


EXCUSED = re.compile(r"_per_kwh")
"""Grams per kilowatt-hour are the field's unit of intensity."""


def test_alerts_do_as_their_own_tests_say() -> None:
    promtool = needs_program("promtool", "prometheus")

    done = subprocess.run(
        [promtool, "test", "rules", "alerts_test.yml"], cwd=RULES, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    alerts = yaml.safe_load((RULES / "alerts.yml").read_text())
    tested = (RULES / "alerts_test.yml").read_text()
    assert [rule["alert"] for group in alerts["groups"] for rule in group["rules"] if rule["alert"] not in tested] == []
