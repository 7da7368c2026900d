"""The credential of one service: what it needs to prove its identity to those it may ask, and to identify those who ask
it.

Everything is derived from one secret of the installation. ``S(a) = HMAC(root, a)`` is the secret of the service asked,
and ``K(i, a) = HMAC(S(a), i)`` the key with which ``i`` signs what it sends to ``a``. A service has its own ``S`` and a
``K`` for each service that it may ask (``callers.CALLERS``), so that a compromised service can pass only as itself.
A node's ``S`` is derived from its enrolment; its agent has that and nothing else.

Only Python itself is needed here, because ``deploy/make_env.py`` makes credentials on hosts that have nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.kit.callers import KEEPERS_OF_NODES, NODE, audiences_of

SHORTEST_SECRET = 16


class CredentialError(ValueError):
    """The text is not a credential, or is that of another service."""


def roots_of(secret: str) -> tuple[bytes, ...]:
    """Return the secrets of an installation from a comma-separated list: the first signs, all are accepted."""
    return tuple(part.strip().encode() for part in secret.split(",") if part.strip())


def audience_secret(root: bytes, audience: str) -> bytes:
    return _derive(root, f"wattshift audience/{audience}")


def caller_key(secret: bytes, issuer: str) -> bytes:
    """Return the key with which ``issuer`` signs for the owner of an audience's secret."""
    return _derive(secret, f"wattshift caller/{issuer}")


def node_secret(nodes_secret: bytes, node_id: str, enrolment: bytes) -> bytes:
    """Return the audience's secret of one node in one enrolment; another host of the same name gets a different one."""
    return _derive(nodes_secret, f"wattshift node/{node_id}/{enrolment.hex()}")


def standing_token(join_token: str, node_id: str) -> str:
    """Return the token with which ``up`` and the compose file let their own node enrol, whenever it has to.

    It is valid for this node only, and not once the node has been revoked.
    """
    return "wsj_" + _text(_derive(join_token.encode(), f"wattshift join/{node_id}"))


@dataclass(frozen=True)
class Credential:
    """The credential of one service."""

    name: str
    secrets: tuple[bytes, ...]
    """Its own secrets, by which it knows its callers; more than one while they are being replaced."""
    keys: Mapping[str, bytes]  #: By service that it may ask, the key with which it signs
    nodes: tuple[bytes, ...] = ()
    """Secrets from which those of nodes are derived; empty except for ``KEEPERS_OF_NODES``."""

    @classmethod
    def derived(cls, name: str, roots: Sequence[bytes]) -> Credential:
        """Return the credential derived from the installation's secrets, newest first."""
        audiences = audiences_of(name)
        return cls(
            name,
            tuple(audience_secret(root, name) for root in roots),
            {audience: caller_key(audience_secret(roots[0], audience), name) for audience in audiences},
            tuple(audience_secret(root, NODE) for root in roots) if name in KEEPERS_OF_NODES else (),
        )

    @classmethod
    def parsed(cls, text: str) -> Credential:
        """Return the credential that ``text`` encodes; ``CredentialError`` if the text is not a credential."""
        try:
            found = json.loads(_bytes(text))
            return cls(
                found["name"],
                tuple(map(_bytes, found["secrets"])),
                {audience: _bytes(key) for audience, key in found["keys"].items()},
                tuple(map(_bytes, found["nodes"])),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CredentialError("it is not the credential of a service") from error

    def text(self) -> str:
        fields = {
            "name": self.name,
            "secrets": [_text(secret) for secret in self.secrets],
            "keys": {audience: _text(key) for audience, key in self.keys.items()},
            "nodes": [_text(secret) for secret in self.nodes],
        }
        return _text(json.dumps(fields, separators=(",", ":")).encode())

    def own_keys(self, purpose: str) -> tuple[bytes, ...]:
        """Return 32-byte keys for one internal purpose of the service, newest first; all its processes share them."""
        return tuple(_derive(secret, f"wattshift own/{purpose}") for secret in self.secrets)

    def peers_secret(self) -> str:
        """Return the secret by which processes of the same service recognise each other."""
        return _text(_derive(self.secrets[0], "wattshift peers"))


def _derive(key: bytes, what: str) -> bytes:
    return hmac.new(key, what.encode(), hashlib.sha256).digest()


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
