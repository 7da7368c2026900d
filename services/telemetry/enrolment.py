"""How a host becomes a node, stays one, and stops being one."""

import asyncio
import hmac
import re
import secrets

from services.contracts import nodes
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.db.database import Connection, Database
from services.kit.credentials import node_secret, standing_token
from services.kit.logging import Log
from services.kit.problems import ProblemError, conflict, not_found
from services.kit.redis_users import without_user
from services.kit.self_signed import fingerprint, new_certificate
from services.telemetry.redis_users import RedisUsers, redis_user
from services.telemetry.repository import credentials
from services.telemetry.settings import TelemetrySettings

log = Log(__name__)

TOKEN_PREFIX = "wse_"
_ENROLMENT_BYTES = 16
_OF_UP = re.compile(r"node-[0-9]+")
_ASK = "ask an admin for a new one (wattshift nodes invite, or nodes enroll)"
_AS = {nodes.NodeRole.AGENT: "a node with an agent", nodes.NodeRole.ENGINE: "the bridge to an engine"}


class Enrolment:
    """Admits nodes by tokens, and gives them credentials of their own.

    Whoever shows a secret, or a token, by which it is not to be admitted gets ``ProblemError``: 401.
    """

    def __init__(self, settings: TelemetrySettings, database: Database, users: RedisUsers | None) -> None:
        """Take what manages users in Valkey or Redis; None if nodes share one."""
        self._settings, self._database, self._users = settings, database, users
        self._nodes_secrets = settings.credential.nodes

    async def allow(self, node_id: str, spec: nodes.NodeEnrolmentSpec, operator: Identity) -> nodes.NodeEnrolment:
        """Return a token by which one host can become this node in a role, for a limited time.

        Raises:
            ProblemError: 409 if the name belongs to a node in the other role.
        """
        token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        async with self._database.transaction() as connection:
            await self._check_role(connection, node_id, spec.role)
            expires_at = await credentials.add_token(connection, token, node_id, spec.role, spec.lifetime_s, operator)
        return nodes.NodeEnrolment(node_id=node_id, role=spec.role, token=token, expires_at=expires_at)

    async def invite(self, spec: nodes.NodeInvitationSpec, admin: Identity) -> nodes.NodeInvitation:
        """Return what a host needs to join, for a time; ``ProblemError``: 409 if none can, or not by this name."""
        if not self._settings.join_url or self._settings.tls_cert is None:
            detail = "Hosts cannot join here: start it by `wattshift up --listen`, or use `wattshift nodes enroll`."
            raise conflict(detail)
        if spec.node_id is not None and _OF_UP.fullmatch(spec.node_id):
            raise conflict(_is_of_up(spec.node_id))
        wanted = nodes.NodeEnrolmentSpec(lifetime_s=spec.lifetime_s)
        found = await self.allow(spec.node_id or credentials.ANY_NEW_NODE, wanted, admin)
        token = f"{found.token}.{fingerprint(self._settings.tls_cert.read_text())}"
        return nodes.NodeInvitation(url=self._settings.join_url, token=token, expires_at=found.expires_at)

    async def certify(self, node_id: str, secret: str) -> nodes.NodeCertificate:
        """Return a new certificate for a node's agent; from now on the control plane knows it by that alone."""
        made = await asyncio.to_thread(new_certificate, node_id)
        async with self._database.transaction() as connection:
            await self._prove(connection, node_id, secret)
            await connection.execute(credentials.CERTIFY, node_id, bytes.fromhex(fingerprint(made)))
        return nodes.NodeCertificate(pem=made)

    async def leave(self, node_id: str, secret: str) -> None:
        """Stop admitting a node, at its own request."""
        async with self._database.transaction() as connection:
            await self._prove(connection, node_id, secret)
            await credentials.revoke(connection, node_id, None)
        log.info("node.left", node=node_id)
        await self._tell_redis()

    async def enrol(self, node_id: str, token: str, keys: nodes.NodeEnroller) -> nodes.NodeCredential:
        """Make a host the node, by a token; the same keys get the same answer again."""
        enrolment = secrets.token_bytes(_ENROLMENT_BYTES)
        async with self._database.transaction() as connection:
            await connection.execute(credentials.LOCK_NAME, node_id)
            known = await credentials.locked(connection, node_id)
            if known is not None and known.revoked_at is None and known.is_of(keys):
                await self._check(connection, node_id, token, known, keys)
                enrolment = known.enrolment
            else:
                role = await self._check(connection, node_id, token, known, keys)
                await credentials.enrol(connection, node_id, keys, enrolment, role)
                log.info("node.enrolled", node=node_id)
        await self._tell_redis()
        return self._answer(node_id, enrolment)

    async def replace(self, node_id: str, secret: str, keys: nodes.NodeKeys) -> nodes.NodeCredential:
        """Accept a node's new keys; the old ones end when it first shows the new secret."""
        async with self._database.transaction() as connection:
            known = await self._prove(connection, node_id, secret)
            shown = credentials.sha256(secret)
            wanted = bytes.fromhex(keys.credential_sha256)
            if _same(shown, known.next_credential_sha256) and wanted == shown and known.next_enrolment:
                await connection.execute(credentials.PROMOTE, node_id)
                enrolment = known.next_enrolment
            elif wanted == shown:  # what was to be replaced has been
                enrolment = known.enrolment
            elif wanted == known.next_credential_sha256 and known.next_enrolment:
                enrolment = known.next_enrolment
            else:
                enrolment = secrets.token_bytes(_ENROLMENT_BYTES)
                await connection.execute(credentials.REPLACE, node_id, wanted, keys.redis_sha256, enrolment)
        await self._tell_redis()
        return self._answer(node_id, enrolment)

    async def revoke(self, node_id: str, operator: Identity) -> None:
        """Stop admitting a node: all it has to be admitted by ends now; ``ProblemError``: 404 if there is none."""
        async with self._database.transaction() as connection:
            await connection.execute(credentials.LOCK_NAME, node_id)
            if not await credentials.revoke(connection, node_id, operator):
                raise not_found("node")
        log.info("node.revoked", node=node_id)
        await self._tell_redis()

    async def _prove(self, connection: Connection, node_id: str, secret: str) -> credentials.CredentialRow:
        """Return a node's credential if the secret is the one in force, or the one to follow it."""
        known = await credentials.locked(connection, node_id)
        shown = credentials.sha256(secret)
        if known is None or known.revoked_at is not None:
            raise _refused("This node has no credential; enrol it.")
        if not _same(shown, known.credential_sha256) and not _same(shown, known.next_credential_sha256):
            raise _refused("This is not the node's credential.")
        return known

    async def admit(self, connection: Connection, registration: nodes.NodeRegistration, secret: str) -> None:
        """Let the sender register as this node; if it shows the new credential, that replaces the old one."""
        node_id = registration.node_id
        known = await credentials.locked(connection, node_id)
        shown = credentials.sha256(secret)
        if known is None:
            if not (self._settings.join_token_enrols and _is(secret, self._settings.join_token)):
                raise _refused("This node has not enrolled.")
            log.warning("node.shared_token", node=node_id, why="its agent is to be upgraded, or to be enrolled")
        elif known.revoked_at is not None:
            raise _refused("The credential of this node was revoked.")
        elif _same(shown, known.next_credential_sha256):
            await connection.execute(credentials.PROMOTE, node_id)
        elif not _same(shown, known.credential_sha256):
            raise _refused("This is not the node's credential.")
        if known is not None and known.role not in (None, registration.role):
            # Only one of the release before comes as far: others say what they are when they enrol.
            raise _wrong_role(node_id, registration.role)
        await self._check_role(connection, node_id, registration.role)

    @staticmethod
    async def _check_role(connection: Connection, node_id: str, role: nodes.NodeRole) -> None:
        """Refuse a name under which a node of the other role has registered."""
        was = await credentials.registered_as(connection, node_id)
        if was not in (None, role):
            raise conflict(f"{node_id} is known as {_AS[was]}. Enrol under another name.")

    async def _check(
        self,
        connection: Connection,
        node_id: str,
        token: str,
        known: credentials.CredentialRow | None,
        keys: nodes.NodeEnroller,
    ) -> str | None:
        """Return the role in which the token admits the sender; None for any."""
        found = await credentials.one_time_token(connection, token, node_id)
        if found is not None:
            if found.role is not None and keys.role not in (None, found.role):
                raise _wrong_role(node_id, keys.role)
            if found.used_as is not None:
                if not (known and known.is_of(keys) and found.used_as.hex() == keys.credential_sha256):
                    raise _refused(f"This token was used before: {_ASK}.")
            elif found.has_expired:
                raise _refused(f"This token has expired: {_ASK}.")
            else:
                if found.is_for_a_new_node:
                    await self._check_new(connection, node_id, known)
                used_as = bytes.fromhex(keys.credential_sha256)
                await connection.execute(credentials.USE_TOKEN, credentials.sha256(token), used_as, node_id)
            return found.role or keys.role
        join_token = self._settings.join_token
        if _is(token, standing_token(join_token, node_id)):
            if known is not None and known.revoked_at is not None:
                raise _refused("This node was revoked: ask an admin for a new token (wattshift nodes enroll).")
            if keys.role is nodes.NodeRole.ENGINE:
                raise _wrong_role(node_id, keys.role)
            return nodes.NodeRole.AGENT
        if _is(token, join_token) and self._settings.join_token_enrols:
            if known is not None and (known.revoked_at is not None or not known.is_of(keys)):
                raise _refused("This node has enrolled before: ask an admin for a token (wattshift nodes enroll).")
        else:
            raise _refused("This token lets nobody in as this node.")
        return keys.role

    @staticmethod
    async def _check_new(connection: Connection, node_id: str, known: credentials.CredentialRow | None) -> None:
        """Refuse a name that another host has, or that `up` may give."""
        if _OF_UP.fullmatch(node_id):
            raise _refused(_is_of_up(node_id))
        is_registered = known is None and await credentials.registered_as(connection, node_id) is not None
        if is_registered or (known is not None and known.revoked_at is None):
            raise _refused(
                f"There is a node {node_id}: join under another name (--name), or in its place, by a token for it "
                f"(wattshift nodes invite {node_id})."
            )

    async def _tell_redis(self) -> None:
        if self._users is not None:
            await self._users.apply()

    def _answer(self, node_id: str, enrolment: bytes) -> nodes.NodeCredential:
        settings = self._settings
        has_user = self._users is not None and self._users.may
        return nodes.NodeCredential(
            node_id=node_id,
            call_secrets=[node_secret(secret, node_id, enrolment).hex() for secret in self._nodes_secrets],
            redis_user=redis_user(node_id) if has_user else None,
            redis_url=(settings.node_redis_url or without_user(settings.redis_url)) if has_user else None,
            rotate_after_s=settings.node_rotate_s,
        )


def _is_of_up(node_id: str) -> str:
    return f"`wattshift up` gives names like {node_id} to nodes of its own host: choose another name."


def _wrong_role(node_id: str, wanted: nodes.NodeRole) -> ProblemError:
    other, option = (
        (nodes.NodeRole.ENGINE, "") if wanted is nodes.NodeRole.AGENT else (nodes.NodeRole.AGENT, " --engine")
    )
    command = f"wattshift nodes enroll {node_id}{option}"
    return _refused(f"This token is for {_AS[other]}, and not for {_AS[wanted]}: ask an admin for one ({command}).")


def _is(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _same(shown: bytes, stored: bytes | None) -> bool:
    return bool(stored) and hmac.compare_digest(shown, stored or b"")


def _refused(detail: str) -> ProblemError:
    return ProblemError(401, ProblemCode.UNAUTHENTICATED, detail)
