"""Policy parameters: declared once on a frozen dataclass, then checked, built from JSON and described from there.

A field has its default, meaning and permitted range::

    promote_knob: float = parameter(0.0, "...", minimum=0.0)

and the dataclass calls ``check_parameters(self)`` in ``__post_init__``. A type that several policies use may bring the
meaning along, as ``Annotated[float, Parameter("...")]``.
"""

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from services.core.domain.errors import PolicyConfigError

Config = TypeVar("Config")

Default = bool | int | float | str | None | list[float] | list[list[float]]


@dataclass(frozen=True)
class Parameter:
    """What a config field means, and the inclusive range of its value (or of each element; for a pair, of the second).

    ``formerly`` is the name it had in the previous release, which is still accepted.
    """

    meaning: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    formerly: str = ""


@dataclass(frozen=True, kw_only=True)
class ParameterDescription(Parameter):
    """One parameter, described for people and for forms."""

    name: str  #: The key in a policy's parameters
    type: str
    """``number``, ``integer``, ``boolean``, ``choice``, ``numbers`` (a list) or ``pairs`` (a list of lists of two
    numbers)."""
    default: Default  #: As JSON
    nullable: bool  #: Whether null is a value; the meaning says what it stands for
    choices: tuple[str, ...] = ()  #: The values of a ``choice``


def parameter(default: object, meaning: str, **more: Any) -> Any:
    """Return a field with this default; the rest as for ``Parameter``."""
    return field(default=default, metadata={Parameter.__name__: Parameter(meaning, **more)})


def seconds(default: float | None, meaning: str, minimum: float = 0.0, **more: Any) -> Any:
    """Return a field for a time."""
    return parameter(default, meaning, unit="s", minimum=minimum, **more)


def share(default: float, meaning: str) -> Any:
    """Return a field from 0 to 1."""
    return parameter(default, meaning, minimum=0.0, maximum=1.0)


def check_parameters(config: object) -> None:
    """Check each field of a config, in ``__post_init__``; ``PolicyConfigError`` points at one that is wrong."""
    for declared in describe_parameters(type(config)):
        _check(getattr(config, declared.name), declared, f"/{declared.name}")


def build_config(config_type: type[Config], parameters: Mapping[str, object]) -> Config:
    """Return a config with these parameters, and defaults; ``PolicyConfigError`` points at one that is wrong."""
    names = accepted_names(config_type)
    values: dict[str, object] = {}
    for given, value in parameters.items():
        name = names.get(given)
        if name is None:
            expected = ", ".join(dict.fromkeys(names.values())) or "none"
            raise PolicyConfigError(f"unknown parameter {given!r}; known: {expected}", pointer=_pointer(given))
        if name in values:
            raise PolicyConfigError(f"{given!r} is given twice, by its present and its former name", _pointer(given))
        values[name] = _frozen(value)
    return config_type(**cast("dict[str, Any]", values))


def accepted_names(config_type: type) -> dict[str, str]:
    """Return the present name of each parameter, by both its present and its former name."""
    declared = [(each.name, each.formerly) for each in describe_parameters(config_type)]
    return {name: name for name, _ in declared} | {former: name for name, former in declared if former}


def _frozen(value: object) -> object:
    return tuple(map(_frozen, cast("list[object]", value))) if isinstance(value, list) else value


@cache
def describe_parameters(config_type: type) -> tuple[ParameterDescription, ...]:
    hints, found = get_type_hints(config_type, include_extras=True), list[ParameterDescription]()
    for each in fields(config_type):
        hint, meant = hints[each.name], each.metadata.get(Parameter.__name__)
        if meant is None:
            hint, meant = get_args(hint)
        kind, nullable, choices = _kind_of(hint)
        own: dict[str, Any] = {"name": each.name, "type": kind, "default": _as_json(each.default)}
        found.append(ParameterDescription(**vars(meant), **own, nullable=nullable, choices=choices))
    return tuple(found)


def _as_json(default: object) -> Default:
    if not isinstance(default, tuple):
        return cast(Default, default)
    return cast(Default, [_as_json(each) for each in cast("tuple[object, ...]", default)])


def _kind_of(hint: Any) -> tuple[str, bool, tuple[str, ...]]:
    """Return the name of a type, whether null is one of its values, and the choices."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (kind,) = (_kind_of(argument) for argument in arguments if argument is not type(None))
        return kind[0], True, kind[2]
    if origin is Literal:
        return "choice", False, arguments
    if origin is tuple:
        return "pairs" if get_origin(arguments[0]) is tuple else "numbers", False, ()
    return {float: "number", int: "integer", bool: "boolean"}[hint], False, ()


def _check(value: object, declared: ParameterDescription, pointer: str) -> None:
    if value is None:
        _refuse(not declared.nullable, "null is not a value here", pointer)
    elif declared.type == "choice":
        _refuse(value not in declared.choices, f"expected one of {', '.join(declared.choices)}, got {value!r}", pointer)
    elif declared.type == "boolean":
        _refuse(not isinstance(value, bool), f"expected true or false, got {value!r}", pointer)
    elif declared.type == "numbers":
        for at, element in enumerate(_listed(value, "a list of numbers", pointer)):
            _check_number(element, declared, f"{pointer}/{at}")
    elif declared.type == "pairs":
        for at, pair in enumerate(_listed(value, "a list of pairs", pointer)):
            numbers = _listed(pair, "two numbers", f"{pointer}/{at}")
            _refuse(len(numbers) != 2, f"expected two numbers, got {pair!r}", f"{pointer}/{at}")
            for which, bounds in enumerate((Parameter(""), declared)):
                _check_number(numbers[which], bounds, f"{pointer}/{at}/{which}")
    else:
        _check_number(value, declared, pointer, integer=declared.type == "integer")


def _listed(value: object, expected: str, pointer: str) -> tuple[object, ...]:
    if not isinstance(value, tuple):
        raise PolicyConfigError(f"expected {expected}, got {value!r}", pointer)
    return cast("tuple[object, ...]", value)


def _check_number(value: object, declared: Parameter, pointer: str, *, integer: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float):
        raise PolicyConfigError(f"expected {'an integer' if integer else 'a number'}, got {value!r}", pointer)
    _refuse(not _is_finite(value), f"expected a finite number, got {value!r}", pointer)
    minimum, maximum = declared.minimum, declared.maximum
    if minimum is not None and value < minimum:
        raise PolicyConfigError(f"must be at least {minimum:g}, got {value!r}", pointer)
    if maximum is not None and value > maximum:
        raise PolicyConfigError(f"must be at most {maximum:g}, got {value!r}", pointer)


def _refuse(wrong: bool, message: str, pointer: str) -> None:
    if wrong:
        raise PolicyConfigError(message, pointer)


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _pointer(name: str) -> str:
    return "/" + name.replace("~", "~0").replace("/", "~1")
