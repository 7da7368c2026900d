"""A pool's model servers, live: on real agents they come up, move to another zone, are replaced, and are drained."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import asyncpg
import psutil
import pytest

from services.cli.commands import CliError
from services.contracts.pools import PlannedInstances, PoolsResult
from services.core.domain.solving import Backend, SolveStatus
from services.db.database import connect
from services.kit.ids import new_id
from tests.integration.conftest import Installation
from tests.support.servers import ROOT, fresh_database, scratch_folder, wait_until

SERVER = [
    "env",
    "-u",
    "WATTSHIFT_API_KEY",
    sys.executable,
    str(ROOT / "examples" / "pools" / "stand_in_server.py"),
    "--load-s",
    "1",
]
PROFILE = {"mode": "one", "max_qps": 10.0, "power_w": 300.0}


def a_spec() -> dict[str, Any]:
    """Return a pool in two zones whose plans are only proposed, so that none but the test's are in force."""
    return {
        "mode": "fixed",
        "places": [{"name": "west", "zone": "US-CAL-CISO"}, {"name": "east", "zone": "DE"}],
        "modes": [{"name": "one", "gpu_model": "A100-SXM4-40GB", "gpus": 1, "command": SERVER}],
        "partitions": [{"name": "all", "classes": [{"name": "any", "profiles": [PROFILE]}]}],
        "probes": {"drain_min_s": 1.0, "grace_s": 2.0},
    }


class Chat:
    """A pool, and the database in which its plans are put in force."""

    def __init__(self, installation: Installation, database_url: str) -> None:
        self.installation = installation
        self._database_url = database_url
        installation.gateway.call("PUT", "/v1/pools/chat", body=a_spec())

    def sql(self, query: str, *arguments: Any) -> list[asyncpg.Record]:
        async def ask() -> list[asyncpg.Record]:
            connection = await connect(self._database_url, application_name="test")
            try:
                return await connection.fetch(query, *arguments)
            finally:
                await connection.close()

        return asyncio.run(ask())

    def plan(self, **counts: int) -> None:
        """Put a plan in force, by place."""
        planned = [
            PlannedInstances(location=place, request_class="any", mode="one", count=count, power_w=300)
            for place, count in counts.items()
        ]
        plan = PoolsResult(
            status=SolveStatus.OPTIMAL, solver=Backend.HIGHS, partition="all", instances=planned
        ).model_dump(mode="json")
        plan_id = new_id("plan")
        self.sql(
            "INSERT INTO pool_plans (id, tenant_id, key_id, pool, revision, trigger, slot_at, from_at, deadline_at, "
            "outcome, decided_at, state, problem, problem_sha256, result, ended_at) SELECT $1, tenant_id, key_id, "
            "name, revision, 'request', now(), now(), now(), 'applied', now(), 'succeeded', '{}', $2, $3, now() "
            "FROM pools",
            *(plan_id, plan_id.encode(), {"plan": plan}),
        )
        self.sql("UPDATE pools SET plan_id = $1, planned_at = now()", plan_id)

    def instances(self, *states: str) -> list[Any]:
        query = {"state": list(states)} if states else {}
        return self.installation.gateway.get("/v1/pools/chat/instances", **query)["items"]

    def ready(self) -> list[str]:
        """Return the places of what is ready, if nothing else is alive."""
        found = self.instances()
        return sorted(each["place"] for each in found) if all(each["state"] == "ready" for each in found) else []

    def wait_ready(self, *places: str) -> None:
        wait_until(lambda: self.ready() == sorted(places), 120)

    def check_one_job_each(self) -> None:
        """No instance has two jobs, and no job is nobody's."""
        jobs = {row["id"] for row in self.sql("SELECT id FROM jobs WHERE project = 'chat'")}
        have = [row["job_id"] for row in self.sql("SELECT job_id FROM pool_instances WHERE job_id IS NOT NULL")]
        assert sorted(have) == sorted(jobs)


@pytest.fixture(scope="module")
def chat(postgres_url: str) -> Iterator[Chat]:
    database_url = fresh_database(postgres_url)
    with scratch_folder() as folder:
        made = Installation(
            *(folder / "data", "1x4@US-CAL-CISO,1x4@DE"),
            **{"DATABASE_URL": database_url, "CARBON_ZONES": "US-CAL-CISO,DE", "SERVING_INSTANCE_LOOK_S": "0.3"},
        )
        made.up()
        yield Chat(made, database_url)
        made.down()


def ask(url: str, seconds: float, answers: list[Any]) -> threading.Thread:
    """Send a request that takes so long; what is answered goes to ``answers``."""

    def send() -> None:
        body = json.dumps({"seconds": seconds}).encode()
        with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=120) as answer:
            answers.append((answer.status, json.load(answer)["instance"], time.time()))

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def server_of(instance_id: str) -> int:
    """Return the process that serves as an instance."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("WATTSHIFT_INSTANCE") == instance_id and str(ROOT) in " ".join(process.cmdline()):
                return process.pid
        except psutil.Error:
            continue
    raise AssertionError(f"no process serves as {instance_id}")


def test_instances_come_up_and_move_to_another_zone_undisturbed(chat: Chat) -> None:
    chat.plan(west=2)
    chat.wait_ready("west", "west")
    old = chat.instances()
    nodes = {chat.installation.job(each["job_id"])["placement"][0]["node_id"] for each in old}
    assert len(nodes) == 1

    answers: list[Any] = []
    threads = [ask(each["url"], 15, answers) for each in old]
    chat.plan(west=1, east=1)
    chat.wait_ready("west", "east")
    for thread in threads:
        thread.join()
    assert sorted((status, instance) for status, instance, _ in answers) == sorted((200, each["id"]) for each in old)
    (gone,) = chat.instances("ended")
    (came,) = [each for each in chat.instances() if each["place"] == "east"]
    assert came["ready_at"] <= gone["draining_at"], "make before break"
    assert gone["reason"] == "not_needed"
    (row,) = chat.sql(
        "SELECT extract(epoch FROM stopping_at)::float8 AS s FROM pool_instances WHERE id = $1", gone["id"]
    )
    (answered_s,) = [at_s for _, instance, at_s in answers if instance == gone["id"]]
    assert row["s"] >= answered_s - 1
    chat.check_one_job_each()


KILLED_AT = [("east", "wanted"), ("west", "ready"), ("east", "starting"), ("west", "starting")]


@pytest.mark.parametrize("moments", [KILLED_AT[:2], pytest.param(KILLED_AT[2:], marks=pytest.mark.slow)])
def test_whoever_is_killed_there_is_one_job_for_each_instance_as_planned(
    chat: Chat, moments: list[tuple[str, str]]
) -> None:
    chat.plan(west=1, east=1)
    chat.wait_ready("west", "east")
    for place, state in moments:
        counts = {"west": 1, "east": 1}
        chat.plan(**counts | {place: 3})
        wait_until(
            lambda place=place, state=state: bool(
                chat.sql(
                    "SELECT 1 FROM pool_instances WHERE place = $1 AND created_at > (SELECT planned_at FROM pools) "
                    "AND (state = $2 OR state = 'ready')",
                    *(place, state),
                )
            )
        )
        chat.installation.kill("serving")
        chat.wait_ready("west", "east", place, place)
        chat.plan(**counts)
        wait_until(lambda: bool(chat.instances("draining", "stopping")), 60)
        chat.installation.kill("serving")
        chat.wait_ready("west", "east")
        chat.check_one_job_each()

    (killed, _) = chat.instances()
    os.kill(server_of(killed["id"]), signal.SIGKILL)
    wait_until(lambda: killed["id"] not in {each["id"] for each in chat.instances()}, 60)
    chat.wait_ready("west", "east")
    (ended,) = [each for each in chat.instances("ended") if each["id"] == killed["id"]]
    job = chat.installation.job(killed["job_id"])
    assert (job["state"], ended["reason"], ended["detail"]) == ("failed", job["reason"], job["detail"])
    chat.check_one_job_each()


def test_a_deleted_pool_is_drained_whole(chat: Chat) -> None:
    chat.plan(west=1, east=1)
    chat.wait_ready("west", "east")
    answers: list[Any] = []
    threads = [ask(each["url"], 5, answers) for each in chat.instances()]
    chat.installation.gateway.call("DELETE", "/v1/pools/chat")

    def is_gone() -> bool:
        try:
            chat.installation.gateway.get("/v1/pools/chat")
        except CliError:
            return True
        return False

    wait_until(is_gone, 60)
    for thread in threads:
        thread.join()
    assert [status for status, _, _ in answers] == [200, 200]
    states = {row["state"] for row in chat.sql("SELECT state FROM jobs WHERE project = 'chat'")}
    assert states <= {"cancelled", "failed", "succeeded"}
    chat.check_one_job_each()
