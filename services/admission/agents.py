"""How admission reaches the nodes' agents: where each one is, and the token that tells it who is asking."""

from collections import OrderedDict
from dataclasses import dataclass

import aiohttp

from services.contracts.identity import Identity
from services.kit.credentials import Credential, roots_of
from services.kit.tokens import Outgoing, outgoing_to_node

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
        self._credential = credential
        self._shared = next(iter(roots_of(shared_token)), b"").decode()
        self._known: OrderedDict[tuple[str, bytes], Outgoing] = OrderedDict()

    def headers(self, node_id: str, agent: Agent, identity: Identity | None = None) -> dict[str, str]:
        """Return the headers for a request to a node, on behalf of ``identity`` or of admission itself."""
        if not agent.enrolment:
            shared = {"authorization": f"Bearer {self._shared}"} if self._shared else {}
            return shared if identity is None else {**shared, OLD_KEY_HEADER: identity.key_id}
        key = node_id, agent.enrolment
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = outgoing_to_node(self._credential, *key)
            if len(self._known) > MOST_NODES:
                self._known.popitem(last=False)
        return known.headers(identity)
