"""Secrets: values that jobs get and nobody can read back."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from services.contracts.invalid import VARIABLE_PATTERN
from services.contracts.schema import Instant, Message, Name, NodeMessage, is_none, maybe, said

MAX_SECRET_BYTES = 65_536
MAX_SECRETS_OF_A_JOB = 50
SECRETS_DIR = "WATTSHIFT_SECRETS_DIR"  #: The variable that names the folder of a job's secret files

EnvironmentName = Annotated[str, StringConstraints(pattern=VARIABLE_PATTERN)]
SecretFileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]


def _value(value: Any) -> str:
    """Check a secret's value; the error message never repeats it."""
    if (
        not isinstance(value, str)
        or not value
        or "\0" in value
        or len(value.encode(errors="replace")) > MAX_SECRET_BYTES
    ):
        raise ValueError(f"must be text of 1 to {MAX_SECRET_BYTES:,} bytes without a NUL character")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError("must be text that UTF-8 can hold")
    return value


SecretText = Annotated[str, BeforeValidator(_value), Field(json_schema_extra={"writeOnly": True}, repr=False)]


class SecretSpec(Message):
    """A value to keep. It replaces the one of the same name and project."""

    value: SecretText = said("At most 64 KiB of text. No answer ever contains it.")
    project: Name | None = maybe("Only for jobs of this project; null: for all of the tenant.")

    @model_validator(mode="before")
    @classmethod
    def _is_an_object(cls, document: Any) -> Any:
        if isinstance(document, str | int | float | list):
            raise ValueError("must be an object with named fields")  # and not what was given: it may be the value
        return document


class Secret(Message):
    """What is known about a secret: everything but its value."""

    name: str
    project: str | None
    version: int = said("Counts how often its value was set.")
    created_at: Instant
    updated_at: Instant


class SecretList(Message):
    """The secrets of a tenant."""

    items: list[Secret]


class SecretUse(Message):
    """A secret that a job gets, as a variable or as a file.

    A secret of the job's project takes precedence over one of the whole tenant.
    """

    name: Name
    env: EnvironmentName | None = maybe("The variable that holds the value.")
    file: SecretFileName | None = maybe("The file in `$WATTSHIFT_SECRETS_DIR` that holds the value.")

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise ValueError("a secret is given as a variable (env) or as a file (file): name one of them")
        if self.env is not None and self.env.startswith("WATTSHIFT_"):
            raise ValueError("variables that begin with WATTSHIFT_ are set by Wattshift; choose another env")
        return self


class SecretsWanted(NodeMessage):
    """A node's request for the secrets of a gang that it is about to start."""

    allocation_id: str = Field(max_length=200)


class OpenedSecret(NodeMessage):
    """A secret with its value, for the node that starts a job with it."""

    name: str
    value: str = Field(repr=False)


class OpenedSecrets(NodeMessage):
    """The secrets of a gang. ``missing`` says, in a sentence for each, why a secret is not available.

    ``instance_key`` is the key that an instance of a pool is to require with the requests sent to it.
    """

    secrets: list[OpenedSecret]
    missing: list[str] = Field(default_factory=list[str])
    instance_key: str | None = Field(default=None, repr=False, exclude_if=is_none)
