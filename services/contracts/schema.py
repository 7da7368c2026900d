"""The base of every message: unknown fields are refused, and times have a time zone."""

import re
from collections.abc import Hashable, Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, Self, TypeVar, dataclass_transform

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from services.contracts.invalid import NAME_PATTERN

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""A name people type: letters, digits, dot, dash, underscore; at most 63 characters."""


def name_or_none(given: object) -> str | None:
    """Return what others have written where a name is wanted; None if it is none, or not written."""
    return given if isinstance(given, str) and re.fullmatch(NAME_PATTERN, given) else None


Account = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.@-]{0,63}$")]
"""An account of the operating system, by its name."""


_NUMBER = re.compile(r"\s*[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?\s*")


def _storable(value: datetime) -> datetime:
    if not 1970 <= value.year <= 9_000:
        raise ValueError("must lie between the years 1970 and 9000")
    return value


def _written_out(value: Any) -> Any:
    """Refuse numbers, which Pydantic would take for seconds or milliseconds, whichever looks likelier."""
    if isinstance(value, int | float) or (isinstance(value, str) and _NUMBER.fullmatch(value)):
        raise ValueError("must be an ISO 8601 date and time, such as 2026-03-01T12:00:00Z")
    return value


Instant = Annotated[AwareDatetime, AfterValidator(_storable), BeforeValidator(_written_out)]
"""A time with a time zone, in a range that every database and library can represent."""

# Pydantic converts true to 1 and "8" to 8. In a user's request, the wrong type is more likely a mistake.
Int = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True)]
LEAST = 1e-6  #: What has to be above 0 is at least that: its inverse is finite, and as seconds it is a time that passes
Positive = Annotated[Real, Field(ge=LEAST, le=1e6)]
Flag = Annotated[bool, Field(strict=True)]


def no_flag(value: Any) -> Any:
    """Return a value that is to be a number; ``ValueError``: it is true or false, which equal 1 and 0 in Python."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


# PostgreSQL's text and jsonb cannot hold U+0000; refusing it here keeps it a 422 and not a server error.
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]


def check_once(values: Iterable[Hashable], problem: str) -> None:
    """Raise ``ValueError`` if a value is there twice; ``{}`` in ``problem`` stands for the first that is."""
    seen = set[Hashable]()
    for value in values:
        if value in seen:
            raise ValueError(problem.format(value))
        seen.add(value)


def is_none(value: object) -> bool:
    """Whether a field is left out, by ``exclude_if``: an older release refuses fields that it does not know."""
    return value is None


def is_empty(value: object) -> bool:
    """Whether a field that is an empty list, 0 or false is left out likewise."""
    return not value


def said(description: str, **more: Any) -> Any:
    """Return a field with a description; ``more`` as for ``Field``."""
    return Field(description=description, **more)


def maybe(description: str, **more: Any) -> Any:
    """Return a field that is null by default; ``more`` as for ``Field``."""
    return Field(default=None, description=description, **more)


def many(description: str, **more: Any) -> Any:
    """Return a field that is an empty list by default; ``more`` as for ``Field``."""
    return Field(default_factory=list, description=description, **more)


@dataclass_transform(kw_only_default=True, field_specifiers=(Field, said))
class Message(BaseModel):
    """A message from one process to another."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def as_stored(cls, document: object) -> Self:
        """Read what some release, maybe a later one, has stored; fields that this one does not know are left out."""
        read = cls.model_validate_json if isinstance(document, str | bytes) else cls.model_validate
        return read(document, extra="ignore")  # pyright: ignore[reportArgumentType]

    @classmethod
    def of(cls, record: object, **more: Any) -> Self:
        """Return a message with what a record has under the same names as its fields, and ``more`` besides."""
        same = (name for name in cls.model_fields if name not in more and hasattr(record, name))
        return cls(**{name: getattr(record, name) for name in same}, **more)


T = TypeVar("T")


class Page(Message, Generic[T]):
    """One page of a list; a later page is asked for by `next_cursor`, null after the last."""

    items: list[T]
    next_cursor: str | None = None


class NodeMessage(Message):
    """A message between a node's agent and the control plane, which may be a release apart: unknown fields are ignored.

    What must not be ignored is sent as a command (`services.contracts.commands`), or by a new route.
    """

    model_config = ConfigDict(extra="ignore")


class NodeValue(StrEnum):
    """Values from an agent, which may be of a later release: unknown ones are read as the value that `unknown` names.

    An older control plane would otherwise refuse the whole heartbeat, and give up the node with all that runs there.
    """

    def __init_subclass__(cls, *, unknown: str) -> None:
        cls.unknown = unknown

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        return cls(cls.unknown) if isinstance(value, str) else None
