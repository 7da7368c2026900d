"""What an operator says of the provider to sign in by: what settings need of it, and no more, for `up` checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import SecretStr, TypeAdapter, ValidationError

KEYS = TypeAdapter(dict[str, str])


@dataclass(frozen=True)
class ProviderSettings:
    """How a provider is reached, and whom it lets in.

    Attributes:
        name: What people call it.
        issuer: Its address.
        client_id: By which it knows this installation.
        client_secret: That proves it.
        claim: Whose values choose the key.
        keys: API keys by values of the claim; of several that fit, the first in the file.
    """

    name: str
    issuer: str
    client_id: str
    client_secret: SecretStr
    claim: str
    keys: Mapping[str, str]


def read_keys(text: str) -> dict[str, str]:
    """Return what a file of keys holds; ValueError if it is none."""
    try:
        return KEYS.validate_json(text)
    except ValidationError as error:
        raise ValueError('must be JSON such as {"research": "ws_..."}') from error
