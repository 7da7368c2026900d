"""The control plane as this node sees it: registration, heartbeats, energy reports."""

import asyncio
from contextlib import suppress
from typing import TypeVar

from pydantic import BaseModel

from services.contracts import nodes
from services.contracts.secrets import OpenedSecrets, SecretsWanted
from services.contracts.sources import ChunkWanted, OpenedChunk
from services.kit.enrolment import Enrolment
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)

M = TypeVar("M", bound=BaseModel)

DEFAULT_HEARTBEAT_INTERVAL_S = 2.0
_UNAUTHENTICATED = 401


class ControlPlane:
    """Calls telemetry with the node's token; if that is refused, registers with its credential for a new one.

    Each call raises ``ProblemError`` if the control plane does not answer, or refuses.
    """

    def __init__(self, client: ServiceClient, enrolment: Enrolment, registration: nodes.NodeRegistration) -> None:
        self._client, self._enrolment, self._registration = client, enrolment, registration
        self._credentials: nodes.NodeCredentials | None = None
        self._registering = asyncio.Lock()

    @property
    def is_registered(self) -> bool:
        """Whether this node believes that the control plane knows it."""
        return self._credentials is not None

    def register_again(self, devices: list[nodes.DeviceInfo]) -> None:
        """Register the node anew with other devices, before its next call to the control plane."""
        self._registration = self._registration.model_copy(update={"devices": devices})
        self._credentials = None

    @property
    def heartbeat_interval_s(self) -> float:
        """How often the control plane wants heartbeats from the node."""
        return self._credentials.heartbeat_interval_s if self._credentials else DEFAULT_HEARTBEAT_INTERVAL_S

    async def heartbeat(self, heartbeat: nodes.Heartbeat, timeout_s: float) -> nodes.HeartbeatReply:
        return await self.call("heartbeat", heartbeat, nodes.HeartbeatReply, timeout_s)

    async def report_energy(self, intervals: list[nodes.EnergyInterval]) -> nodes.EnergyReceipt:
        """Deliver energy intervals; doing so twice is harmless."""
        return await self.call("energy", nodes.EnergyReport(intervals=intervals), nodes.EnergyReceipt, 10.0)

    async def open_secrets(self, allocation_id: str) -> OpenedSecrets:
        """Return the secrets of a gang that this node is to start."""
        return await self.call("secrets", SecretsWanted(allocation_id=allocation_id), OpenedSecrets, 10.0)

    async def read_chunk(self, allocation_id: str, number: int) -> OpenedChunk:
        """Return a part of the archive of a gang that this node is to start."""
        wanted = ChunkWanted(allocation_id=allocation_id, number=number)
        return await self.call("upload", wanted, OpenedChunk, 30.0)

    async def _register(self) -> nodes.NodeCredentials:
        """Register this node; one call at a time, because a new token may invalidate the previous one."""
        async with self._registering:
            while self._credentials is None:
                secret = await self._enrolment.secret()
                registration = self._registration
                try:
                    credentials = await self._client.call(
                        "POST",
                        "/v1/nodes/register",
                        nodes.NodeCredentials,
                        body=registration,
                        headers={"authorization": f"Bearer {secret}"},
                    )
                except ProblemError as error:
                    if error.status == _UNAUTHENTICATED:
                        self._enrolment.refused()
                    raise
                log.info("node.registered", lease_ttl_s=credentials.lease_ttl_s)
                with suppress(ProblemError):
                    await self._enrolment.refresh()
                if registration is self._registration:  # else its devices changed meanwhile
                    self._credentials = credentials
            return self._credentials

    async def call(self, what: str, body: BaseModel, answer: type[M], timeout_s: float) -> M:
        """Make a call for this node, with its token."""
        credentials = self._credentials or await self._register()
        with suppress(ProblemError):  # the old secrets stay in force, and it is tried again with the next heartbeat
            await self._enrolment.renew()
        try:
            return await self._client.call(
                "POST",
                f"/v1/nodes/{self._registration.node_id}/{what}",
                answer,
                body=body,
                headers={"authorization": f"Bearer {credentials.token}"},
                timeout_s=timeout_s,
            )
        except ProblemError as error:
            if error.status == _UNAUTHENTICATED and self._credentials is credentials:
                log.info("node.token_refused")
                self._credentials = None
            raise
