"""Sessions in sealed cookies: none is stored, and every gateway of the installation can open them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import TypeVar

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from pydantic import BaseModel, ValidationError
from starlette.types import Scope

PURPOSE = "dashboard sessions"
CSRF_HEADER = b"x-csrf-token"

M = TypeVar("M", bound=BaseModel)


class Session(BaseModel, frozen=True):
    """Somebody who has signed in."""

    key: str  #: The API key that they act with
    csrf: str  #: A token that requests which change something must repeat, and that other sites cannot read
    name: str | None = None  #: Their name at the sign-in provider; None if they signed in with the key itself

    @classmethod
    def begun(cls, key: str, name: str | None = None) -> Session:
        """Return a new session."""
        return cls(key=key, csrf=secrets.token_urlsafe(24), name=name)

    @property
    def id(self) -> str:
        """An id that tells it from other sessions and reveals nothing else."""
        return hashlib.sha256(self.csrf.encode()).hexdigest()

    @property
    def authorization(self) -> bytes:
        """The header from which the edge takes the key."""
        return b"Bearer " + self.key.encode()

    def has_token(self, given: bytes | str | None) -> bool:
        """Return whether a request repeats the session's token."""
        given = given.encode("utf-8", "replace") if isinstance(given, str) else given or b""
        return hmac.compare_digest(given, self.csrf.encode())


class Link(BaseModel, frozen=True):
    """A link that signs somebody in once."""

    key: str
    nonce: str
    then: str

    @property
    def id(self) -> str:
        """An id that tells it from other links and reveals nothing else."""
        return hashlib.sha256(self.nonce.encode()).hexdigest()


class Seals:
    """Seals small messages into cookies, and opens them again for as long as they are valid."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Take keys of 32 bytes; the first seals, and all of them open."""
        self._fernet = MultiFernet([Fernet(base64.urlsafe_b64encode(key)) for key in keys])

    def seal(self, message: BaseModel) -> str:
        """Return ``message`` as the value of a cookie that nobody else can read or change."""
        return self._fernet.encrypt(message.model_dump_json(exclude_none=True).encode()).decode()

    def open(self, model: type[M], sealed: str | None, valid_s: int) -> M | None:
        """Return what was sealed at most ``valid_s`` seconds ago; None for anything else."""
        if not sealed:
            return None
        try:
            return model.model_validate_json(self._fernet.decrypt(sealed, ttl=valid_s))
        except (InvalidToken, ValidationError):
            return None


def cookie_name(name: str, scope: Scope) -> str:
    """Return a cookie's name; over TLS with the prefix that makes browsers tie it to this host and to TLS."""
    return f"__Host-wattshift-{name}" if scope["scheme"] == "https" else f"wattshift-{name}"


def cookie_of(name: str, scope: Scope, header: bytes | None) -> str | None:
    """Return the value of one of our cookies in a request; None if it is missing."""
    wanted = cookie_name(name, scope).encode()
    for pair in (header or b"").split(b";"):
        key, _, value = pair.strip().partition(b"=")
        if key == wanted:
            return value.decode("latin-1")
    return None


def set_cookie(name: str, scope: Scope, value: str, *, max_age_s: int, same_site: str = "Strict") -> str:
    """Return the header that sets a cookie, or removes it if the value is empty and the age zero."""
    secure = "; Secure" if scope["scheme"] == "https" else ""
    return f"{cookie_name(name, scope)}={value}; Path=/; HttpOnly; SameSite={same_site}; Max-Age={max_age_s}{secure}"
