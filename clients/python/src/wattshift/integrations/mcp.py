"""A server of the Model Context Protocol, whose tools submit, explain, simulate and account for jobs.

``wattshift mcp``, or ``python -m wattshift.integrations.mcp``, speaks it over standard input and output, with the
rights of one API key. Each tool returns the API's answer, field by field; a refusal by the API becomes the
tool's error, with its code.
"""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import quote

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from wattshift.aio import AsyncClient
from wattshift.errors import WattshiftError

INSTRUCTIONS = (
    "Wattshift runs GPU work on time with the least carbon. `submit` takes a job, `explain` says why it waits, how it "
    "runs or what became of it, `what_if` replays past jobs under other policies, and `report` sums energy and "
    "emissions. Amounts are in joules, grams of CO2 and GPU-seconds; null is unknown."
)
POLL_S = 1.0


def server(client: AsyncClient, clock_s: Callable[[], float] = time.monotonic, poll_s: float = POLL_S) -> MCPServer:
    """Return a server of tools that ask the API as the owner of the client's key."""
    found = MCPServer("wattshift", instructions=INSTRUCTIONS)

    async def ask(method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            return (await client.request(method, path, **options)).json()
        except WattshiftError as error:
            raise ToolError(str(error)) from error

    @found.tool()
    async def submit(job: dict[str, Any], idempotency_key: str | None = None) -> dict[str, Any]:
        """Submit a job; when this answers, it is accepted and stored.

        Args:
            job: Its spec, such as `{"name": "train", "command": ["python3", "train.py"], "gpus": {"min": 1, "max": 4},
                "time_limit_s": 3600, "deadline": "2026-12-01T06:00:00Z"}`.
            idempotency_key: The same key with the same job submits nothing a second time.
        """
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        return await ask("POST", "/v1/jobs", json=job, headers=headers)

    @found.tool()
    async def explain(job_id: str) -> dict[str, Any]:
        """Say why a job waits, how it runs or how it ended, what it emits, and what other policies would do with it.

        `waiting.one_change` is the smallest change that would start a waiting job now or earlier, if one is known.
        """
        return await ask("GET", f"/v1/jobs/{quote(job_id, safe='')}/explain", params={"one_change": "true"})

    @found.tool()
    async def what_if(simulation: dict[str, Any], wait_s: float = 60) -> dict[str, Any]:
        """Replay past jobs under other policies; while its `status` is `queued` or `running`, ask for its `id` again.

        Args:
            simulation: Such as `{"policy": ["fifo", "joint"], "jobs": "history", "days": 7, "start":
                "2026-11-01T00:00:00Z"}`, or `{"id": "..."}` for one that was requested before.
            wait_s: How long to wait for its end.
        """
        if set(simulation) == {"id"}:
            made = simulation
        else:
            made = await ask("POST", "/v1/simulations", json=simulation, headers={"idempotency-key": uuid.uuid4().hex})
        until_s = clock_s() + wait_s
        while True:
            state = await ask("GET", f"/v1/simulations/{quote(str(made['id']), safe='')}")
            if state["status"] not in ("queued", "running") or clock_s() >= until_s:
                return state
            await asyncio.sleep(poll_s)

    @found.tool()
    async def report(
        group_by: str = "project",
        start: datetime | None = None,
        end: datetime | None = None,
        project: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        """Sum energy and emissions of a period by job, user, project, tenant, model, zone, node, day, week or month."""
        period = {"start": start and start.isoformat(), "end": end and end.isoformat(), "project": project}
        params = {"group_by": group_by, **period, "limit": limit, "cursor": cursor}
        return await ask("GET", "/v1/reports/footprint", params=params)

    return found


def main(url: str | None = None, key: str | None = None) -> None:
    """Serve over standard input and output until they are closed; address and key by default from the environment."""

    async def serve() -> None:
        async with AsyncClient(url, key) as client:
            await server(client).run_stdio_async()

    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Ctrl-C waits for the thread that reads standard input
    asyncio.run(serve())


if __name__ == "__main__":
    main()
