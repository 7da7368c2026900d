"""How admission reaches the nodes' agents: where each one is, and the token that tells it who is asking."""

from dataclasses import dataclass
from functools import lru_cache, partial

import aiohttp

from services.contracts.identity import Identity
from services.kit.credentials import Credential, roots_of
from services.kit.tokens import outgoing_to_node

MOST_NODES = 10_000
OLD_KEY_HEADER = "x-wattshift-key"  #: By which agents of the release before learn whose session an exec session is


@dataclass(frozen=True, slots=True)
class Agent:
    """A node's agent."""

    url: str  #: Its address
    enrolment: bytes | None  #: The enrolment it belongs to; None for an agent of the previous release
    certificate_sha256: bytes | None = None
    """Hash of the one certificate accepted from a node that has joined; None: any that an authority vouches for."""

    @property
    def tls(self) -> aiohttp.Fingerprint | bool:
        """How a request verifies that it has reached this agent: aiohttp's option `ssl`."""
        return True if self.certificate_sha256 is None else aiohttp.Fingerprint(self.certificate_sha256)


class AgentTokens:
    """Makes the headers of requests to agents."""

    def __init__(self, credential: Credential, shared_token: str) -> None:
        """Take the token that agents of the previous release ask for; empty if there are none."""
        self._shared = next(iter(roots_of(shared_token)), b"").decode()
        self._outgoing = lru_cache(MOST_NODES)(partial(outgoing_to_node, credential))

    def headers(self, node_id: str, agent: Agent, identity: Identity | None = None) -> dict[str, str]:
        """Return the headers for a request to a node, on behalf of ``identity`` or of admission itself."""
        if not agent.enrolment:
            shared = {"authorization": f"Bearer {self._shared}"} if self._shared else {}
            return shared if identity is None else {**shared, OLD_KEY_HEADER: identity.key_id}
        return self._outgoing(node_id, agent.enrolment).headers(identity)
