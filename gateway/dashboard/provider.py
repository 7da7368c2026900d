"""The operator's settings of the sign-in provider, without the code that uses it: `up` checks them."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import SecretStr, TypeAdapter, ValidationError

KEYS = TypeAdapter(dict[str, str])


@dataclass(frozen=True)
class ProviderSettings:
    """How a provider is reached, and whom it lets in."""

    name: str  #: Its name for people
    issuer: str  #: Its address
    client_id: str  #: The id by which it knows this installation
    client_secret: SecretStr  #: The secret that proves it
    claim: str  #: The claim whose values select the key
    keys: Mapping[str, str]  #: API keys by values of the claim; if several match, the first in the file


def read_keys(text: str) -> dict[str, str]:
    """Return the content of a file of keys; raise ValueError if it is not one."""
    try:
        return KEYS.validate_json(text)
    except ValidationError as error:
        raise ValueError('must be JSON such as {"research": "ws_..."}') from error
