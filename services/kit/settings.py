"""Settings that several processes share; each process adds its own class with its own prefix."""

import os
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from services.kit.credentials import SHORTEST_SECRET, Credential, roots_of
from services.kit.extras import traces_missing
from services.kit.networks import read_networks
from services.kit.sentinel import watched
from services.kit.tls import Tls
from services.kit.tls import check as check_tls

EXIT_BAD_SETTINGS = 2
PUBLIC = ("gateway", "router")  #: Services that users reach
NO_SERVICE_TOKEN = "WATTSHIFT_SERVICE_TOKEN is not set: Secret by which the services recognise each other."
NOT_POSTGRES = "DATABASE_URL must be the postgresql:// address of a server"
SECRET_VARIABLES = frozenset(
    {
        "DATABASE_URL",
        "REDIS_URL",
        "WATTSHIFT_API_KEY",
        "WATTSHIFT_SERVICE_CREDENTIAL",
        "WATTSHIFT_SERVICE_TOKEN",
        "WATTSHIFT_NODE_JOIN_TOKEN",
        "WATTSHIFT_JOIN_TOKEN",
        "WATTSHIFT_SECRETS_KEY",
        "GPU_AGENT_ENROLL_TOKEN",
        "GPU_AGENT_CHECKPOINT_STORE_KEY",
        "GPU_AGENT_CHECKPOINT_STORE_SECRET",
    }
)
"""Variables of the installation's own that only the process gets which needs them; no job and no command does."""
SECRET_NAME = re.compile("TOKEN|PASSWORD|SECRET|CREDENTIAL|KEY|URL")
"""Variables whose values are not repeated in messages; an address may contain a password."""


class SharedSettings(BaseSettings):
    """Addresses and secrets of the installation, the same for every process.

    A process's own settings subclass this with ``env_prefix``; the fields here keep their full names.
    """

    model_config = SettingsConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    database_url: str = Field("", validation_alias="DATABASE_URL")
    redis_url: str = Field("redis://127.0.0.1:6379/0", validation_alias="REDIS_URL")
    service_credential: str = Field(
        "",
        validation_alias="WATTSHIFT_SERVICE_CREDENTIAL",
        description="What this service proves itself with, and knows its callers by; of no use to any other.",
    )
    service_token: str = Field(
        "",
        validation_alias="WATTSHIFT_SERVICE_TOKEN",
        description="Secret by which the services recognise each other, where they have no credentials of their own; "
        "several, separated by commas: the first signs, all are accepted.",
    )
    carbon_url: str = Field("http://127.0.0.1:8010", validation_alias="WATTSHIFT_CARBON_URL")
    admission_url: str = Field("http://127.0.0.1:8020", validation_alias="WATTSHIFT_ADMISSION_URL")
    scheduler_url: str = Field("http://127.0.0.1:8030", validation_alias="WATTSHIFT_SCHEDULER_URL")
    optimizer_url: str = Field("http://127.0.0.1:8040", validation_alias="WATTSHIFT_OPTIMIZER_URL")
    simulator_url: str = Field("http://127.0.0.1:8080", validation_alias="WATTSHIFT_SIMULATOR_URL")
    router_url: str = Field("http://127.0.0.1:8050", validation_alias="WATTSHIFT_ROUTER_URL")
    serving_url: str = Field("http://127.0.0.1:8090", validation_alias="WATTSHIFT_SERVING_URL")
    telemetry_url: str = Field("http://127.0.0.1:8060", validation_alias="WATTSHIFT_TELEMETRY_URL")
    endpoint_networks: str = Field(
        "",
        validation_alias="WATTSHIFT_ENDPOINT_NETWORKS",
        description="Networks, such as 10.8.0.0/16, in which registered model servers may be; none by default.",
    )
    tls_cert: Path | None = Field(
        None, validation_alias="WATTSHIFT_TLS_CERT", description="Certificate of this host; without one, plain HTTP."
    )
    tls_key: Path | None = Field(None, validation_alias="WATTSHIFT_TLS_KEY", description="Key of the certificate.")
    tls_ca: Path | None = Field(
        None,
        validation_alias="WATTSHIFT_TLS_CA",
        description="Certificates of the authority by which other hosts are known; by default those of the system.",
    )
    tls_clients: Literal["any", "required"] = Field(
        "any",
        validation_alias="WATTSHIFT_TLS_CLIENTS",
        description="required: services and agents let in only those who show a certificate of the authority. The "
        "gateway and the router, which users reach, ask for none.",
    )
    zone: str = Field(
        "US-CAL-CISO", validation_alias="WATTSHIFT_ZONE", description="Grid zone of nodes that name none."
    )
    pue: float = Field(
        1.0,
        ge=1,
        le=10,
        allow_inf_nan=False,
        validation_alias="TELEMETRY_PUE",
        description="Energy of the facility per energy of its devices.",
    )
    database_dir: Path | None = Field(
        None,
        validation_alias="WATTSHIFT_DATABASE_DIR",
        description="A folder on the disk of PostgreSQL, where that is on this host: while it is nearly full, nothing "
        "is accepted and nothing started. `wattshift up` sets it.",
    )
    database_reserve_bytes: int = Field(
        2**30,
        ge=0,
        validation_alias="WATTSHIFT_DATABASE_RESERVE_BYTES",
        description="What stays free of that disk for what runs already, of a small one a tenth at most.",
    )
    data_dir: Path = Field(Path(".wattshift"), validation_alias="WATTSHIFT_DATA_DIR")
    max_requests: int = Field(
        1_000,
        ge=1,
        validation_alias="WATTSHIFT_MAX_REQUESTS",
        description="Requests that a process works on at once, before their answers begin; beyond it, they get 503 "
        "with Retry-After.",
    )
    traces: Literal["off", "otlp"] = Field(
        "off",
        validation_alias="WATTSHIFT_TRACES",
        description="otlp: spans of requests and jobs go to the collector at OTEL_EXPORTER_OTLP_ENDPOINT.",
    )
    log_format: str = Field(
        "text",
        pattern="^(text|json)$",
        validation_alias="WATTSHIFT_LOG_FORMAT",
        description="json: one object a line; text: time, level, event, and its fields as logfmt.",
    )
    log_level: str = Field(
        "INFO",
        validation_alias="WATTSHIFT_LOG_LEVEL",
        description="Of Python's logging; DEBUG adds what probes and services ask all day.",
    )

    @field_validator("redis_url")
    @classmethod
    def _names_a_server(cls, value: str) -> str:
        watched(value)
        return value

    @field_validator("traces")
    @classmethod
    def _traces_are_installed(cls, value: str) -> str:
        if value != "off" and (hint := traces_missing()):
            raise ValueError(hint)
        return value

    @field_validator("service_token")
    @classmethod
    def _tokens_are_long(cls, value: str) -> str:
        if value and (not roots_of(value) or any(len(root) < SHORTEST_SECRET for root in roots_of(value))):
            raise ValueError(f"must have at least {SHORTEST_SECRET} characters")
        return value

    @field_validator("service_credential")
    @classmethod
    def _is_its_own(cls, value: str) -> str:
        if value:
            found = Credential.parsed(value)
            if found.name != cls.service_name():
                raise ValueError(f"it is that of the {found.name}, and this is the {cls.service_name()}")
        return value

    @model_validator(mode="after")
    def _has_a_credential(self) -> Self:
        if not self.service_credential and not self.service_token:
            raise ValueError(NO_SERVICE_TOKEN)
        return self

    @field_validator("tls_cert", "tls_key", "tls_ca", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return value or None

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        check_tls(self.tls)
        return self

    @property
    def tls(self) -> Tls:
        """How this process identifies itself to other hosts, and identifies them."""
        asks = self.tls_clients == "required" and self.service_name() not in PUBLIC
        return Tls(self.tls_cert, self.tls_key, self.tls_ca, asks)

    @classmethod
    def service_name(cls) -> str:
        """Return the name of the process in ``services.kit.callers``."""
        return str(cls.model_config.get("env_prefix", "")).rstrip("_").lower()

    @property
    def credential(self) -> Credential:
        """This service's credential: its own, or one derived from the secret that all services share."""
        if self.service_credential:
            return Credential.parsed(self.service_credential)
        return Credential.derived(self.service_name(), roots_of(self.service_token))

    @field_validator("endpoint_networks")
    @classmethod
    def _names_networks(cls, value: str) -> str:
        read_networks(value)
        return value


class SealingSettings(SharedSettings):
    """Settings shared by the processes that store users' secrets, or hand them to nodes and routers."""

    secrets_key: str = Field(
        "",
        validation_alias="WATTSHIFT_SECRETS_KEY",
        description="Seals users' secrets in the database, at least 32 characters; several, separated by commas: the "
        "first seals, all of them open.",
    )

    @field_validator("secrets_key")
    @classmethod
    def _keys_are_long(cls, value: str) -> str:
        if value and any(len(key.strip()) < 32 for key in value.split(",")):
            raise ValueError("each key must have at least 32 characters")
        return value


Settings = TypeVar("Settings", bound=SharedSettings)


def settings_or_exit(settings_type: type[Settings], *, database: bool = False) -> Settings:
    """Return a process's settings; if any are wrong, print a line for each that is, and exit with status 2.

    Args:
        database: Whether the process needs ``DATABASE_URL``.
    """
    try:
        settings = settings_type()  # pyright: ignore[reportCallIssue]  # the environment fills it
    except (ValidationError, SettingsError) as error:
        exit_with(*faults_of(settings_type, error))
    if database and not is_postgres(settings.database_url):
        exit_with(NOT_POSTGRES)
    return settings


def is_postgres(url: str) -> bool:
    """Return whether an address has the form of a PostgreSQL server's."""
    return re.match(r"postgres(ql)?(\+\w+)?://", url) is not None


def exit_with(*lines: str) -> NoReturn:
    """Print what is wrong with the settings, a line for each fault, and exit with status 2."""
    print("\n".join(lines), file=sys.stderr)
    sys.exit(EXIT_BAD_SETTINGS)


def settings_faults(settings_type: type[SharedSettings], environment: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the settings that a process would read from ``environment``, one line per variable."""
    with _environment(environment):
        try:
            settings_type()  # pyright: ignore[reportCallIssue]
        except (ValidationError, SettingsError) as error:
            return faults_of(settings_type, error)
    return []


def faults_of(settings_type: type[SharedSettings], error: ValidationError | SettingsError) -> list[str]:
    """Return one line for each wrong variable: its name, its value unless that is secret, and what would be right."""
    if isinstance(error, SettingsError):  # the value of a list or a pair is not JSON
        found = re.search(r'field "(\w+)"', str(error))
        field = settings_type.model_fields.get(found[1]) if found else None
        if found is None or field is None:
            return [str(error)]
        return [_line(variable_of(settings_type, found[1]), "must be JSON", field)]
    return [_fault(settings_type, fault) for fault in error.errors(include_url=False)]


def variable_of(settings_type: type[SharedSettings], name: str) -> str:
    """Return the environment variable of a field, which is given by its name or its alias."""
    field = settings_type.model_fields.get(name)
    if field is None:
        return name
    alias = field.validation_alias
    return alias if isinstance(alias, str) else f"{settings_type.model_config.get('env_prefix', '')}{name}".upper()


def _fault(settings_type: type[SharedSettings], fault: ErrorDetails) -> str:
    if not fault["loc"]:
        return fault["msg"].removeprefix("Value error, ")
    variable = variable_of(settings_type, str(fault["loc"][0]))
    fields = {variable_of(settings_type, name): field for name, field in settings_type.model_fields.items()}
    field = fields.get(variable)
    if fault["type"] == "missing":
        return f"{variable} is not set" + (f": {field.description}" if field and field.description else "")
    right = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    right = re.sub(r", unable to parse string as an? \w+$", "", right)
    right = re.sub(r"^String should", "must", right)
    return _line(variable, right, field)


def _line(variable: str, right: str, field: FieldInfo | None) -> str:
    value = os.environ.get(variable)
    shown = variable if value is None or SECRET_NAME.search(variable) else f"{variable}={value[:60]}"
    default: Any = None if field is None or field.is_required() else field.default
    return f"{shown}: {right}" + (f" (default {default})" if isinstance(default, int | float | str) and default else "")


@contextmanager
def _environment(environment: Mapping[str, str]) -> Generator[None]:
    """Temporarily replace this process's environment by ``environment``, since pydantic-settings reads no other."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
