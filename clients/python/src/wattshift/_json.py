"""Converts JSON into the dataclasses of ``wattshift.models`` and back."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, Union

T = TypeVar("T")


def read(kind: type[T], value: Any) -> T:
    """Return JSON as an object of ``kind``.

    Fields that this release does not know are left out, as a newer control plane may send them.

    Raises:
        ValueError: A required field is missing.
    """
    return _read(kind, value)


def written(value: Any) -> Any:
    """Return what may be sent as JSON: models as mappings without the fields that are None, instants in ISO 8601."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {name: written(each) for name, each in fields.items() if each is not None}
    if isinstance(value, Mapping):
        return {str(name): written(each) for name, each in typing.cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [written(each) for each in typing.cast("list[Any]", value)]
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone: add one, such as datetime.UTC")
        return value.isoformat()
    return value


def _read(kind: Any, value: Any) -> Any:
    if value is None or kind is Any:
        return value
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _read(_choice(typing.get_args(kind), value), value)
    if origin is list:
        return [_read(typing.get_args(kind)[0], each) for each in value]
    if origin is dict:
        return {name: _read(typing.get_args(kind)[1], each) for name, each in value.items()}
    if dataclasses.is_dataclass(kind):
        return _model(kind, value)
    return datetime.fromisoformat(value) if kind is datetime else value


def _choice(kinds: tuple[Any, ...], value: Any) -> Any:
    """Return the member of a union that fits: of several models, the first whose required fields are all there."""
    if isinstance(value, dict):
        for kind in kinds:
            if dataclasses.is_dataclass(kind) and _required(kind) <= value.keys():
                return kind
    if isinstance(value, list):
        return next((kind for kind in kinds if typing.get_origin(kind) is list), Any)
    if isinstance(value, str) and str not in kinds and datetime in kinds:
        return datetime
    return Any


def _model(kind: Any, value: dict[str, Any]) -> Any:
    missing = _required(kind) - value.keys()
    if missing:
        raise ValueError(f"{kind.__name__} has no field {', '.join(sorted(missing))}")
    return kind(**{name: _read(each, value[name]) for name, each in _fields(kind).items() if name in value})


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@cache
def _required(kind: Any) -> frozenset[str]:
    missing = dataclasses.MISSING
    return frozenset(
        each.name for each in dataclasses.fields(kind) if each.default is missing and each.default_factory is missing
    )
