"""One node's agent: `python -m gpu_agent.app`."""

import ctypes
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from gpu_agent.agent import Agent
from gpu_agent.endpoints import PROGRESS_PREFIX, ProgressDoor, router, state_router
from gpu_agent.reporting import MeasuringAgent, show_figures
from gpu_agent.settings import AgentSettings
from services.contracts.nodes import NodeRole
from services.kit.app import create_service, serve
from services.kit.callers import NODE
from services.kit.enrolment import Enrolment, NodeRedis
from services.kit.http import ServiceClient, new_session
from services.kit.settings import settings_or_exit
from services.kit.tokens import Incoming

_PR_SET_DUMPABLE = 4
_MOST_BODY_BYTES = 512 * 1024


def create_app(settings: AgentSettings) -> FastAPI:
    """Return the agent as an app; it runs from the app's start to its end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with new_session(tls=settings.tls) as session:
            client = ServiceClient(session, settings.telemetry_url, "telemetry")
            enrolment = app.state.incoming = Enrolment(settings, client, NodeRole.AGENT)
            redis = NodeRedis(settings, enrolment)
            given = settings, client, enrolment
            agent = app.state.agent = MeasuringAgent(*given) if settings.measure_only else Agent(*given, redis)
            show_figures(app.state.metrics, agent)
            await agent.start()
            try:
                yield
            finally:
                await agent.stop()
                await redis.aclose()

    async def readiness() -> None:
        await app.state.agent.check_ready()

    app = create_service(
        "wattshift gpu agent",
        settings,
        lifespan=lifespan,
        readiness=readiness,
        open_prefixes=() if settings.measure_only else (PROGRESS_PREFIX,),
        max_body_bytes=_MOST_BODY_BYTES,
        incoming=Incoming(NODE, ()),  # nobody, before the agent has started
    )
    app.add_middleware(ProgressDoor, port=settings.progress_port)
    app.include_router(state_router)
    if not settings.measure_only:
        app.include_router(router)
    return app


def hide_memory() -> None:
    """Keep other processes of the same user, such as jobs, from reading this process's environment and secrets."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def main() -> None:
    hide_memory()
    settings = settings_or_exit(AgentSettings)
    # An agent that began without its port would end the node's gangs on its way out.
    beside = () if settings.measure_only else (settings.progress_port,)
    serve(create_app(settings), "gpu_agent", settings, settings.host, settings.port, listens_first=True, beside=beside)


if __name__ == "__main__":
    main()
