"""Gateway, admission, telemetry and carbon service as processes, and the client before them; a module's tests share."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.services import Running, services
from wattshift import Client


@dataclass
class Front:
    """Where the control plane is, whose key asks, and the gateway to kill."""

    url: str
    key: str
    gateway: Running

    def client(self) -> Client:
        """Return a client."""
        return Client(self.url, self.key)


@pytest.fixture(scope="module")
def front(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """The public API as its users reach it; nothing runs jobs."""
    folder = tmp_path_factory.mktemp("clients")
    with (
        services(
            folder, database_url, redis_url, CARBON_ZONES="GB", WATTSHIFT_NODE_JOIN_TOKEN="a-join-token-for-tests"
        ) as found,
        found.started("carbon_service.app"),
        found.started("services.telemetry.app"),
        found.started("services.admission.app"),
        found.started("gateway.app", "/healthz") as gateway,
    ):
        yield Front(found.urls["GATEWAY"], found.admin_key(), gateway)


@pytest.fixture
def client(front: Front) -> Iterator[Client]:
    """A client with the admin's key."""
    with front.client() as found:
        yield found
