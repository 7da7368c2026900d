"""Secrets and signatures of webhooks, following the Standard Webhooks specification, section "Signature scheme"."""

import base64
import hashlib
import hmac

PREFIX = "whsec_"


class Signer:
    """Derives the secrets of webhooks from the installation's own, so that the database holds none of them."""

    def __init__(self, installation_secret: str) -> None:
        self._key = installation_secret.encode()

    def secret(self, webhook_id: str, revision: int) -> str:
        """Return the secret of a webhook: 256 bits that only this installation can compute."""
        digest = hmac.new(self._key, f"webhook/{webhook_id}/{revision}".encode(), hashlib.sha256).digest()
        return PREFIX + base64.b64encode(digest).decode()


def fingerprint(secret: str) -> bytes:
    """Return a hash that shows later whether the installation's secret is still the one ``secret`` was derived from."""
    return hashlib.sha256(secret.encode()).digest()


def sign(secret: str, message_id: str, timestamp_s: int, body: str) -> str:
    """Return one signature for the header `webhook-signature`.

    Args:
        secret: ``whsec_`` and the key in base64.
        message_id: The header `webhook-id`.
        timestamp_s: The header `webhook-timestamp`, UTC seconds.
        body: The body as sent.
    """
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signed = f"{message_id}.{timestamp_s}.{body}".encode()
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
