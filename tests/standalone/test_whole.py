"""The whole installation as `wattshift up` starts it: killed one by one, all at once, stopped, started again."""

import json
import os
import random
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.kit.settings import PUBLIC
from services.standalone.data_folder import ProcessStatus, StackStatus
from services.standalone.processes import SERVICES, WORKERS
from services.standalone.stack import down, new_admin_key, read_status, up
from tests.simulator.service.test_api import GRID, JOBS
from tests.support.servers import http_ready, scratch_folder, wait_until


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("DATABASE_URL", "REDIS_URL", "WATTSHIFT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    with scratch_folder() as folder:
        yield folder
        down(folder)


AS_THEY_ARE = ("running", "asleep")


def all_run(folder: Path) -> bool:
    status = read_status(folder)
    return status.state == "running" and all(process.state in AS_THEY_ARE for process in status.processes)


def by_name(status: StackStatus) -> dict[str, ProcessStatus]:
    return {process.name: process for process in status.processes}


def works(status: StackStatus, key: str) -> bool:
    request = urllib.request.Request(f"{status.gateway_url}/v1/keys", headers={"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as error:
        return error.code != 401


def asked(status: StackStatus, key: str, path: str, body: object = None) -> Any:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{status.gateway_url}{path}", data, headers)) as answer:
        return json.load(answer)


def works_off(folder: Path, key: str) -> None:
    """A what-if run is queued while every worker sleeps, and one wakes for it."""
    status = read_status(folder)
    assert {by_name(status)[name].state for name in WORKERS} == {"asleep"}
    files = {"jobs": {"text": JOBS}, "carbon": {"text": GRID}}
    run = asked(status, key, "/v1/simulations", {"policy": "fifo", "cluster": "2x4:A100", **files})
    path = f"/v1/simulations/{run['id']}"
    wait_until(lambda: asked(status, key, path)["status"] not in ("queued", "running"))
    assert asked(status, key, path)["status"] == "succeeded"
    states = {name: by_name(read_status(folder))[name].state for name in WORKERS}
    assert states == dict.fromkeys(WORKERS, "asleep") | {"simulator-worker": "running"}


def test_up_and_down_and_up(folder: Path) -> None:
    """The second time without options, and with the admin key lost while it was down, then while it is up."""
    key_file = folder / "admin.key"
    for nodes in ("2x2@DE", None):
        status = up(folder, nodes=nodes)
        assert {service.name for service in SERVICES} < by_name(status).keys()
        assert {"postgres", "valkey", *WORKERS, "agent-node-1", "agent-node-2"} < by_name(status).keys()
        assert {process.restarts for process in status.processes} == {0}
        for service in SERVICES:
            at = by_name(status)[service.name]
            assert (at.port is not None) == (service.name in PUBLIC)
            assert http_ready(Path(at.socket) if at.socket else ("127.0.0.1", at.port))
        lost = key_file.read_text().strip()
        assert works(status, lost)
        if nodes is not None:
            works_off(folder, lost)
            said = (folder / "log/telemetry.log").read_text()
            assert "/register " in said
            assert "/heartbeat" not in said, "what nodes report all day is no line each"
        else:
            key_file.unlink()
            new_admin_key(folder)
            assert works(status, key_file.read_text().strip())
            wait_until(lambda lost=lost: not works(read_status(folder), lost), within_s=10)
        left = [p for child in psutil.Process(status.pid).children() for p in (child, *child.children(recursive=True))]
        assert down(folder)
        assert not [process for process in left if process.is_running()]
        key_file.unlink()
        assert new_admin_key(folder) == key_file


@pytest.mark.slow
def test_every_process_comes_back(folder: Path) -> None:
    before = by_name(up(folder, nodes="2x2")).keys() - set(WORKERS)  # they sleep
    for name in random.sample(sorted(before), k=len(before)):
        os.kill(by_name(read_status(folder))[name].pid, signal.SIGKILL)
        wait_until(lambda name=name: by_name(read_status(folder))[name].restarts == 1, within_s=5)
        wait_until(lambda: all_run(folder), within_s=30)
    restarts = {name: process.restarts for name, process in by_name(read_status(folder)).items()}
    assert restarts == dict.fromkeys(before, 1) | dict.fromkeys(WORKERS, 0), "none took another down with it"


@pytest.mark.slow
def test_all_at_once_and_the_supervisor_too(folder: Path) -> None:
    status = up(folder, nodes="2x2")
    for pid in filter(None, (status.pid, *(process.pid for process in status.processes))):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: read_status(folder).state == "stopped")
    again = up(folder, nodes="2x2")
    assert all(process.state in AS_THEY_ARE for process in again.processes)
