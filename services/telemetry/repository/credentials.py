"""Who may be a node: one-time tokens, and the hashes of each node's credentials."""

import hashlib
from datetime import datetime
from typing import NamedTuple

from services.contracts.identity import Identity
from services.contracts.nodes import NodeKeys, NodeRole
from services.db import audit
from services.db.database import Connection
from services.db.rows import fetch_row

ANY_NEW_NODE = ""  #: In the place of a node's name: a token for a host whose name no node has

_LOCKED = """
SELECT credential_sha256, redis_sha256, enrolment, next_credential_sha256, next_redis_sha256, next_enrolment,
    revoked_at, role
FROM node_credentials WHERE node_id = $1 FOR UPDATE
"""

_ADD_TOKEN = """
INSERT INTO node_enrolments (token_sha256, node_id, expires_at, role)
VALUES ($1, $2, now() + make_interval(secs => $3), $4) RETURNING expires_at
"""

# Tokens are kept for a day after they expire, so that a node is told what is wrong with its own.
_FORGET_TOKENS = "DELETE FROM node_enrolments WHERE expires_at < now() - interval '1 day'"

_TOKEN = f"""
SELECT used_as, expires_at <= now() AS has_expired, role, node_id = '{ANY_NEW_NODE}' AS is_for_a_new_node
FROM node_enrolments WHERE token_sha256 = $1 AND node_id IN ($2, '{ANY_NEW_NODE}') FOR UPDATE
"""

# From now on no other node can use it.
USE_TOKEN = "UPDATE node_enrolments SET used_as = $2, node_id = $3 WHERE token_sha256 = $1"

_ENROL = """
INSERT INTO node_credentials (node_id, credential_sha256, redis_sha256, enrolment, role) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (node_id) DO UPDATE SET
    credential_sha256 = excluded.credential_sha256, redis_sha256 = excluded.redis_sha256,
    enrolment = excluded.enrolment, role = excluded.role,
    next_credential_sha256 = NULL, next_redis_sha256 = NULL, next_enrolment = NULL, certificate_sha256 = NULL,
    enrolled_at = now(), rotated_at = now(), revoked_at = NULL
"""

# New keys are good besides the present ones.
REPLACE = """
UPDATE node_credentials SET next_credential_sha256 = $2, next_redis_sha256 = $3, next_enrolment = $4
WHERE node_id = $1
"""

# A node's new keys take the place of its old ones.
PROMOTE = """
UPDATE node_credentials SET
    credential_sha256 = next_credential_sha256, redis_sha256 = next_redis_sha256, enrolment = next_enrolment,
    next_credential_sha256 = NULL, next_redis_sha256 = NULL, next_enrolment = NULL, rotated_at = now()
WHERE node_id = $1
"""

# A node that never enrolled gets a row too, so that the shared token lets it in no more.
_REVOKE = """
INSERT INTO node_credentials (node_id, credential_sha256, redis_sha256, enrolment, revoked_at)
VALUES ($1, '', '', '', now())
ON CONFLICT (node_id) DO UPDATE SET
    credential_sha256 = '', redis_sha256 = '', enrolment = '', next_credential_sha256 = NULL,
    next_redis_sha256 = NULL, next_enrolment = NULL, revoked_at = coalesce(node_credentials.revoked_at, now())
"""

# Hosts become a node, and are revoked, one after the other, even before there is a row to lock. It comes first in a
# transaction: enrolling a new one takes its token and then makes the credential, revoking is the other way round.
LOCK_NAME = "SELECT pg_advisory_xact_lock(hashtextextended('node_credentials ' || $1, 0))"
CERTIFY = "UPDATE node_credentials SET certificate_sha256 = $2 WHERE node_id = $1"
_END_SESSION = "UPDATE nodes SET token_sha256 = '' WHERE id = $1"
_DROP_TOKENS = "DELETE FROM node_enrolments WHERE node_id = $1"

_REDIS_USERS = """
SELECT node_id, array_remove(ARRAY[redis_sha256, next_redis_sha256], NULL) AS passwords
FROM node_credentials WHERE revoked_at IS NULL
"""

_REGISTERED_AS = "SELECT CASE WHEN driver = 'engine' THEN 'engine' ELSE 'agent' END FROM nodes WHERE id = $1"
_EXISTS = """
SELECT EXISTS (SELECT FROM nodes WHERE id = $1) OR EXISTS (SELECT FROM node_credentials WHERE node_id = $1)
    OR EXISTS (SELECT FROM node_enrolments WHERE node_id = $1)
"""


class CredentialRow(NamedTuple):
    """A node's credential, locked for the transaction."""

    credential_sha256: bytes
    redis_sha256: str
    enrolment: bytes
    next_credential_sha256: bytes | None
    next_redis_sha256: str | None
    next_enrolment: bytes | None
    revoked_at: datetime | None
    role: str | None

    def is_of(self, keys: NodeKeys) -> bool:
        """Whether these are the keys in force."""
        return (self.credential_sha256.hex(), self.redis_sha256) == (keys.credential_sha256, keys.redis_sha256)


class TokenRow(NamedTuple):
    """A one-time token, locked for the transaction."""

    used_as: bytes | None
    has_expired: bool
    role: str | None
    is_for_a_new_node: bool


def sha256(secret: str) -> bytes:
    """Return the stored hash of a secret."""
    return hashlib.sha256(secret.encode()).digest()


async def locked(connection: Connection, node_id: str) -> CredentialRow | None:
    """Return a node's credential, and keep others from changing it."""
    return await fetch_row(connection, CredentialRow, _LOCKED, node_id)


async def registered_as(connection: Connection, node_id: str) -> NodeRole | None:
    """Return the role that has registered under this name, which it keeps; None if none has."""
    found = await connection.fetchval(_REGISTERED_AS, node_id)
    return None if found is None else NodeRole(found)


async def add_token(
    connection: Connection, token: str, node_id: str, role: NodeRole, lifetime_s: float, operator: Identity
) -> datetime:
    """Store a one-time token; return when it expires."""
    await connection.execute(_FORGET_TOKENS)
    await audit.note(connection, operator, "node.enrolment_allowed", node_id or "any")
    return await connection.fetchval(_ADD_TOKEN, sha256(token), node_id, lifetime_s, role)


async def one_time_token(connection: Connection, token: str, node_id: str) -> TokenRow | None:
    """Return a one-time token of a node, or of any new one."""
    return await fetch_row(connection, TokenRow, _TOKEN, sha256(token), node_id)


async def enrol(connection: Connection, node_id: str, keys: NodeKeys, enrolment: bytes, role: str | None) -> None:
    """Give a node its credential; the host that was that node before no longer is."""
    credential = bytes.fromhex(keys.credential_sha256)
    await connection.execute(_ENROL, node_id, credential, keys.redis_sha256, enrolment, role)
    await connection.execute(_END_SESSION, node_id)
    await audit.note(connection, None, "node.enrolled", node_id)


async def revoke(connection: Connection, node_id: str, operator: Identity | None) -> bool:
    """Stop admitting a node, and end its tokens; return False if there is none of that name.

    Without an operator, the node itself leaves. Hold ``LOCK_NAME``, or the lock of its credential.
    """
    if not await connection.fetchval(_EXISTS, node_id):
        return False
    await connection.execute(_REVOKE, node_id)
    await connection.execute(_DROP_TOKENS, node_id)
    await connection.execute(_END_SESSION, node_id)
    await audit.note(connection, operator, "node.left" if operator is None else "node.revoked", node_id)
    return True


async def redis_users(connection: Connection) -> dict[str, list[str]]:
    """Return the hashes of the passwords by which nodes may use Valkey or Redis, by node."""
    return {row["node_id"]: row["passwords"] for row in await connection.fetch(_REDIS_USERS)}
