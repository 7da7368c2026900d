"""Values that are stored only in encrypted form: AES-256-GCM under keys that the database does not have."""

import hashlib
import os
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_FORMAT = b"\x01"
_NONCE_BYTES = 12
SEAL_BYTES = len(_FORMAT) + _NONCE_BYTES + 16  #: What a sealed value has more than the value: the tag of GCM, too


class SealError(Exception):
    """A value cannot be opened: none of the keys sealed it for this place."""


class Sealer:
    """Seals values and opens them again.

    Args:
        keys: Secrets of the installation, at least 32 characters each, separated by commas: the first seals, all of
            them open, so that a key can be replaced. Empty: there is no key.
    """

    def __init__(self, keys: str) -> None:
        self._ciphers = [AESGCM(_digest(key.strip())) for key in keys.split(",") if key.strip()]

    @property
    def has_key(self) -> bool:
        return bool(self._ciphers)

    def seal(self, value: str, *place: str) -> bytes:
        """Return a value encrypted.

        Args:
            value: Text that can be encoded in UTF-8.
            place: Where it is stored. It can be opened only there, so that nobody with access to the database can swap
                two.
        """
        nonce = os.urandom(_NONCE_BYTES)
        return _FORMAT + nonce + self._ciphers[0].encrypt(nonce, value.encode(), _bound(place))

    def open(self, sealed: bytes, *place: str) -> str:
        """Return the value sealed for this place; ``SealError`` if by another key, for another place, or changed."""
        nonce, encrypted = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        for cipher in self._ciphers if sealed[:1] == _FORMAT and encrypted else ():
            try:
                return cipher.decrypt(nonce, encrypted, _bound(place)).decode()
            except InvalidTag:
                continue
        raise SealError("none of the installation's keys opens it")


def _digest(key: str) -> bytes:
    return hashlib.sha256(b"wattshift secrets\0" + key.encode()).digest()


def _bound(place: tuple[str, ...]) -> bytes:
    return "\0".join(place).encode()


_PLACE = "instance key"


def new_instance_key(sealer: Sealer, tenant_id: str, instance: str) -> bytes | None:
    """Return a new key, sealed; None if the installation has no key to seal with."""
    return sealer.seal(secrets.token_urlsafe(32), _PLACE, tenant_id, instance) if sealer.has_key else None


def open_instance_key(sealer: Sealer, sealed: bytes, tenant_id: str, instance: str) -> str:
    """Return the key of an instance; ``SealError`` if it was sealed under another key of the installation."""
    return sealer.open(sealed, _PLACE, tenant_id, instance)
