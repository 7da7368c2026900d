"""The agents' ``/metrics``, gathered here because admission is the process that may ask agents."""

import asyncio
from typing import Annotated

import aiohttp
from fastapi import APIRouter, Response
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.agents import Agent, AgentTokens
from services.admission.repository.jobs import JobRepository
from services.contracts.identity import Identity
from services.kit.identity import Operator
from services.kit.metrics import MEDIA_TYPE
from services.kit.routes import from_state
from services.kit.scraping import SERVICE_UP, merged, scraped

AT_ONCE = 64


class AgentMetrics:
    """Gathers the metrics of the agents of all nodes that are up."""

    def __init__(self, engine: AsyncEngine, session: aiohttp.ClientSession, tokens: AgentTokens) -> None:
        self._engine, self._session, self._tokens = engine, session, tokens
        self._free = asyncio.Semaphore(AT_ONCE)

    async def text(self, caller: Identity) -> str:
        """Return the metrics of all agents; ``wattshift_service_up`` says which did not answer."""
        async with self._engine.connect() as connection:
            agents = await JobRepository(connection).agents_up()
        found = await asyncio.gather(*(self._ask(node, agent, caller) for node, agent in agents.items()))
        parts = [({"service": "agent", "instance": node}, text) for node, text in zip(agents, found, strict=True)]
        return await asyncio.to_thread(merged, parts)

    async def _ask(self, node: str, agent: Agent, caller: Identity) -> str:
        async with self._free:
            headers = self._tokens.headers(node, agent, caller)
            text = await scraped(self._session, f"{agent.url}/metrics", headers, tls=agent.tls)
        return SERVICE_UP.format(int(text is not None)) + (text or "")


TheMetrics = Annotated[AgentMetrics, from_state("agent_metrics")]
router = APIRouter(prefix="/internal/agents")


@router.get("/metrics")
async def read_agent_metrics(caller: Operator, metrics: TheMetrics) -> Response:
    """Return the metrics of all nodes' agents."""
    return Response(await metrics.text(caller), media_type=MEDIA_TYPE)
