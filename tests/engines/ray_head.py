"""A stand-in for the dashboard of Ray's head: jobs, nodes and placement groups in memory, and wrong answers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.support.ports import Ports


class RayHead:
    """What a head answers; every attribute may be changed at any time."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.nodes = [a_node("n1", "gpu-1", 4, "DE"), a_node("n2", "gpu-2", 4, "SE")]
        self.groups: list[dict[str, Any]] = []
        self.actors: list[dict[str, Any]] = []
        self.wrong: dict[str, Callable[[], web.Response]] = {}
        self.stopped: list[str] = []

    def submit(self, name: str, status: str = "RUNNING", **fields: Any) -> dict[str, Any]:
        """Have a job, as the Job API has it."""
        self.jobs[name] = {
            **{"type": "SUBMISSION", "job_id": f"driver-{name}", "submission_id": name, "status": status},
            **{"entrypoint": "python -m wattshift.ray", "message": "Job is currently running.", "error_type": None},
            **{"start_time": int(time.time() * 1000), "end_time": None, "metadata": {"user": "ann"}},
            **{"driver_exit_code": None, **fields},
        }
        return self.jobs[name]

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[str]:
        """Answer until the end of the block."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        app.router.add_post("/api/jobs/{name}/stop", self._stop)
        runner, ports = web.AppRunner(app, access_log=None), Ports()
        await runner.setup()
        port = ports.take(29_265)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()
            ports.release()

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path
        if path in self.wrong:
            return self.wrong[path]()
        found: dict[str, Any] = {
            "/api/version": {"ray_version": "2.60.0"},
            "/api/jobs/": list(self.jobs.values()),
            "/api/v0/nodes": listed(self.nodes),
            "/api/v0/placement_groups": listed(self.groups),
            "/api/v0/actors": listed(self.actors),
        }
        return web.json_response(found[path])

    async def _stop(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.stopped.append(name)
        self.jobs[name] |= {"status": "STOPPED", "end_time": int(time.time() * 1000)}
        return web.json_response({"stopped": True})


def listed(items: list[Any], **fields: Any) -> dict[str, Any]:
    """Return an answer of the state API."""
    whole = {"total": len(items), "num_after_truncation": len(items), "partial_failure_warning": "", "result": items}
    return {"result": True, "msg": "", "data": {"result": whole | fields}}


def a_node(node_id: str, name: str, gpus: int, zone: str | None = None, state: str = "ALIVE") -> dict[str, Any]:
    """Return a node, as the state API has it."""
    resources = {"CPU": 8.0, "GPU": float(gpus), f"node:{node_id}": 1.0, "accelerator_type:A100": 1.0}
    resources |= {f"zone:{zone}": 1.0} if zone else {}
    return {"node_id": node_id, "node_name": name, "state": state, "resources_total": resources}
