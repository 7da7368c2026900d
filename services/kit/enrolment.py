"""A node's credential: obtained by enrolling with a token, kept in the node's own folder, replaced from time to time.

The node makes its secrets itself, and writes them down before it sends their hashes. So an answer that is lost, or a
kill at any point, costs nothing: the same request is made again, and gets the same answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from redis.exceptions import AuthenticationError

from services.contracts.nodes import NodeCredential, NodeEnroller, NodeKeys, NodeRole
from services.contracts.schema import Name
from services.kit import files
from services.kit.callers import NODE
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError, unavailable
from services.kit.redis import connect
from services.kit.settings import SharedSettings, variable_of
from services.kit.tokens import Caller, Incoming, refused

log = Log(__name__)

FILE = "credential.json"
TOKEN_FILE = "enroll-token"
REFRESH_EVERY_S = 3_600.0  #: How often a node asks what has changed; a secret that was dropped is accepted for so long
LEARN_EVERY_S = 5.0
"""How often a node asks, at most, whether services have a new secret, because one that it does not know has called."""
_UNAUTHENTICATED = 401


class NodeSettings(SharedSettings):
    """Settings of every kind of node: a host's agent, or the bridge to an engine."""

    node_id: Name
    enroll_token: str = Field(
        "", description="The token of `wattshift nodes enroll`, for which the node gets a credential of its own."
    )
    join_token: str = Field(
        "",
        validation_alias="WATTSHIFT_NODE_JOIN_TOKEN",
        description="The token that all nodes of earlier releases share; it too is traded for a credential.",
    )
    state_dir: Path | None = Field(None, description="By default the node's folder under the data folder.")

    @model_validator(mode="after")
    def _has_a_credential(self) -> Self:
        """Require none of the services' secrets: the node's own is in its state folder, once it has enrolled."""
        return self

    @property
    def data_folder(self) -> Path:
        """The folder that all nodes share, if the site has one."""
        return self.data_dir.expanduser().absolute()

    @property
    def state_folder(self) -> Path:
        return self.state_dir.expanduser().absolute() if self.state_dir else self.data_folder / "nodes" / self.node_id


class Keys(BaseModel):
    """Secrets that the node has made for itself."""

    model_config = ConfigDict(frozen=True)

    secret: str
    redis_password: str

    @classmethod
    def new(cls) -> Keys:
        """Return keys that nobody else can guess."""
        return cls(secret="wsn_" + secrets.token_urlsafe(32), redis_password=secrets.token_urlsafe(32))

    def hashes(self) -> NodeKeys:
        secret, password = (hashlib.sha256(each.encode()).hexdigest() for each in (self.secret, self.redis_password))
        return NodeKeys(credential_sha256=secret, redis_sha256=password)


class Held(BaseModel):
    """A credential as the control plane issued it."""

    model_config = ConfigDict(frozen=True)

    keys: Keys
    call_secrets: list[str]
    redis_user: str | None = None
    redis_url: str | None = None
    since_s: float
    rotate_after_s: float

    @classmethod
    def given(cls, keys: Keys, answer: NodeCredential) -> Held:
        """Return the keys that the control plane has accepted."""
        return cls(keys=keys, since_s=time.time(), **answer.model_dump(exclude={"node_id"}))


class Kept(BaseModel):
    """The file: what the node has, what it has asked for, and the secrets with which services may still call it."""

    held: Held | None = None
    asked: Keys | None = None
    former_call_secrets: list[str] = []


class Enrolment:
    def __init__(self, settings: NodeSettings, client: ServiceClient, role: NodeRole) -> None:
        self._settings, self._client, self._role = settings, client, role
        self._path = settings.state_folder / FILE
        self._busy = asyncio.Lock()
        self._is_refused = False
        self._learns_at_s = 0.0
        self._refreshes_at_s = time.monotonic() + REFRESH_EVERY_S
        self._kept = self._read()
        self._incoming = self._callers()
        self._has_one = asyncio.Event()
        if self._kept.held is not None:
            self._has_one.set()

    @property
    def held(self) -> Held | None:
        """The credential in force; None before the node has enrolled."""
        return self._kept.held

    async def until_enrolled(self) -> None:
        await self._has_one.wait()

    async def secret(self) -> str:
        """Return the secret to register with, enrolling first if necessary.

        Raises:
            ProblemError: The control plane does not answer, or no token lets this node in.
        """
        async with self._busy:
            held = self._kept.held
            if held is None or self._is_refused:
                self._is_refused = False  # if enrolling fails, the one that there is will be tried again
                held = await self._enrol() or held
            if held is None:
                raise unavailable("A token to enrol with")
            return held.keys.secret

    def refused(self) -> None:
        """Note that the secret was refused: enrol again, if there is a token for that."""
        self._is_refused = True

    async def renew(self) -> None:
        """Replace the secrets when they are due; after a ``ProblemError`` the old ones stay in force."""
        held = self._kept.held
        if held is None:
            return
        if 0 <= time.time() - held.since_s < held.rotate_after_s:
            if time.monotonic() >= self._refreshes_at_s:
                await self.refresh()
            return
        async with self._busy:
            asked = self._kept.asked or Keys.new()
            self._keep(self._kept.model_copy(update={"asked": asked}))
            answer = await self._ask("rotate", held.keys.secret, asked)
            self._take(asked, answer)
            # Shown once, so that what was before ends. If this call is lost, the next registration does it.
            await self._ask("rotate", asked.secret, asked)
            log.info("node.credential_replaced")

    async def refresh(self) -> None:
        """Ask where Redis is and which secrets services use; after a ``ProblemError``, the old ones stay in force."""
        async with self._busy:
            self._refreshes_at_s = time.monotonic() + REFRESH_EVERY_S
            held = self._kept.held
            if held is None:
                return
            answer = await self._ask("rotate", held.keys.secret, held.keys)  # by the same keys: nothing is replaced
            now = Held.given(held.keys, answer).model_copy(update={"since_s": held.since_s})
            is_old = not 0 <= time.time() - held.since_s < REFRESH_EVERY_S
            former = [] if is_old else self._kept.former_call_secrets
            if (now, former) != (held, self._kept.former_call_secrets):
                self._keep(self._kept.model_copy(update={"held": now, "former_call_secrets": former}))
                self._incoming = self._callers()

    def caller(self, authorization: str, method: str, path: str) -> Caller:
        """Return the service that calls this node; ``ProblemError``: 401 or 403, as for ``Incoming``."""
        if self._incoming is None:
            raise refused()
        return self._incoming.caller(authorization, method, path)

    async def has_learned(self) -> bool:
        """Ask, once in a while, which secrets services now use; return whether they have changed."""
        now_s = time.monotonic()
        if self._kept.held is None or now_s < self._learns_at_s:
            return False
        self._learns_at_s = now_s + LEARN_EVERY_S
        before = self._incoming
        with suppress(ProblemError):
            await self.refresh()
        return self._incoming is not before

    async def _enrol(self) -> Held | None:
        tokens = self._tokens()
        if not tokens and self._kept.held is None:
            variable = variable_of(type(self._settings), "enroll_token")
            command = "wattshift nodes enroll" + (" --engine" if self._role is NodeRole.ENGINE else "")
            log.error("node.not_enrolled", why=f"there is no token: set {variable} ({command})")
        refusal: ProblemError | None = None
        for token in tokens:
            asked = self._kept.asked or Keys.new()
            self._keep(self._kept.model_copy(update={"asked": asked}))
            try:
                answer = await self._ask("enroll", token, asked)
            except ProblemError as error:
                if error.status != _UNAUTHENTICATED:
                    raise
                refusal = error
                continue
            log.info("node.enrolled")
            return self._take(asked, answer)
        if refusal is not None and self._kept.held is None:
            raise refusal
        return None

    def _tokens(self) -> list[str]:
        """Return the tokens that may let this node in, in the order in which they are tried."""
        found = [self._settings.enroll_token, self._settings.join_token]
        with suppress(OSError):  # there is none
            found.insert(0, (self._settings.state_folder / TOKEN_FILE).read_text().strip())
        return [token for token in dict.fromkeys(found) if token]

    async def _ask(self, what: str, token: str, keys: Keys) -> NodeCredential:
        return await self._client.call(
            "POST",
            f"/v1/nodes/{self._settings.node_id}/{what}",
            NodeCredential,
            body=NodeEnroller(role=self._role, **keys.hashes().model_dump()) if what == "enroll" else keys.hashes(),
            headers={"authorization": f"Bearer {token}"},
        )

    def _take(self, keys: Keys, answer: NodeCredential) -> Held:
        former = self._kept.held.call_secrets if self._kept.held else []
        held = Held.given(keys, answer)
        self._keep(Kept(held=held, former_call_secrets=former))
        self._incoming = self._callers()
        self._has_one.set()
        return held

    def _callers(self) -> Incoming | None:
        held = self._kept.held
        if held is None:
            return None
        known = [bytes.fromhex(each) for each in (*held.call_secrets, *self._kept.former_call_secrets)]
        return Incoming(f"{NODE}/{self._settings.node_id}", known, NODE)

    def _read(self) -> Kept:
        try:
            return Kept.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return Kept()
        except (OSError, ValidationError) as error:
            log.error("node.credential_unreadable", file=str(self._path), error=type(error).__name__)
            return Kept()

    def _keep(self, kept: Kept) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(self._path, kept.model_dump_json().encode(), mode=0o600)
        self._kept = kept


class NodeRedis:
    """The client of Valkey or Redis that this node may use now: with its own user, once it has enrolled."""

    def __init__(self, settings: NodeSettings, enrolment: Enrolment) -> None:
        self._settings, self._enrolment = settings, enrolment
        self._held: Held | None = None
        self._client: Any = None

    def __getattr__(self, name: str) -> Any:
        """Return the client's attribute of that name; ``AuthenticationError`` if the node has not enrolled yet."""
        held = self._enrolment.held
        if held is None:
            raise AuthenticationError("the node has not enrolled yet")
        if self._client is None or held is not self._held:
            self._client, self._held = self._connected(held), held
        return getattr(self._client, name)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _connected(self, held: Held) -> Any:
        settings = self._settings
        is_set = "redis_url" in settings.model_fields_set
        url = settings.redis_url if is_set or held.redis_url is None else held.redis_url
        user = held.redis_user and (held.redis_user, held.keys.redis_password)
        return connect(url, settings, user=user or None)
