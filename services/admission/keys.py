"""API keys as secrets: generated, recognised and hashed."""

import hashlib
import secrets

KEY_PATTERN = r"ws_[A-Za-z0-9_-]{43}"


def new_secret() -> str:
    """Return a new key: 256 random bits after a prefix that lets scanners find leaked keys."""
    return "ws_" + secrets.token_urlsafe(32)


def key_hash(secret: str) -> bytes:
    """Return the hash by which a key is stored.

    Plain SHA-256 on purpose: slow hashes protect passwords that can be guessed, which 256 random bits cannot be. A slow
    hash would delay every request whose key is not in the gateway's cache.
    """
    return hashlib.sha256(secret.encode()).digest()
