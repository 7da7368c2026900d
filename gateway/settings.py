"""Settings of the gateway."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, StringConstraints, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.contracts.schema import maybe, said
from services.kit.edge.settings import EdgeSettings

_KEYS = TypeAdapter(dict[str, str])
Address = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#]+/?$")]


class GatewaySettings(EdgeSettings):
    """``GATEWAY_*``, and the settings that all processes share."""

    model_config = SettingsConfigDict(env_prefix="GATEWAY_")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    open_emissions: bool = said(
        "Answer `/emissions/...` and `/locations` without a key: the Carbon Aware API's clients send none.",
        default=False,
    )
    open_requests_per_s: float = said("Without a key, from one address.", default=5, ge=1e-6)
    open_burst: int = said("Without a key, from one address after a pause.", default=20, ge=1)
    session_s: int = said(
        "How long after signing in the dashboard asks again.", default=12 * 3600, ge=60, le=31 * 86_400
    )
    oidc_issuer: str = said(
        "Address of an OpenID Connect provider to sign in by.", default="", pattern=r"^(https?://\S+)?$"
    )
    oidc_name: str = said("What people call it.", default="your organisation")
    oidc_client_id: str = ""
    oidc_client_secret: SecretStr = SecretStr("")
    oidc_claim: str = said("The claim whose values choose the API key.", default="groups")
    oidc_keys: Path | None = maybe("JSON file: API keys by values of that claim.")
    max_streams_per_tenant: int = said("Event and log streams open at once, at all gateways.", default=200, ge=1)
    group_entries: int = said("Most submissions in one request to admission.", default=128, ge=1)
    group_bytes: int = said("Their bodies together, unless one is larger.", default=4 * 1024 * 1024, ge=1)
    groups_in_flight: int = said("Requests with submissions on their way at once.", default=2, ge=1)
    submit_timeout_s: float = Field(default=15, gt=0)
    upstream_timeout_s: float = said("For an answer that is not a stream.", default=30, gt=0)
    connect_timeout_s: float = Field(default=2, gt=0)
    stream_silence_s: float = said("A stream silent for so long is closed.", default=60, gt=0)

    metrics_instances: dict[str, tuple[Address, ...]] = said(
        "JSON: all addresses of services that run several times behind one, by service, for `/metrics`.",
        default_factory=dict[str, tuple[Address, ...]],
    )

    @field_validator("metrics_instances")
    @classmethod
    def _names_services(cls, value: dict[str, tuple[Address, ...]]) -> dict[str, tuple[Address, ...]]:
        from gateway.metrics import SERVICES  # loads all routes, which `up` need not to check its settings

        if unknown := sorted(value.keys() - SERVICES):
            raise ValueError(f"{unknown[0]} is no service; there are {', '.join(sorted(SERVICES))}")
        return value

    @field_validator("oidc_keys")
    @classmethod
    def _holds_keys(cls, value: Path | None) -> Path | None:
        if value is not None:
            read_keys(value)
        return value

    @model_validator(mode="after")
    def _knows_the_provider(self) -> Self:
        if self.oidc_issuer and not (self.oidc_client_id and self.oidc_keys):
            raise ValueError("GATEWAY_OIDC_ISSUER needs GATEWAY_OIDC_CLIENT_ID and GATEWAY_OIDC_KEYS")
        return self


def read_keys(path: Path) -> dict[str, str]:
    """Return the API keys in a file, by values of the claim; ``ValueError`` says why there are none."""
    try:
        return _KEYS.validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise ValueError('must be JSON such as {"research": "ws_..."}') from error
