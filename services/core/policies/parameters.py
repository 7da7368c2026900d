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
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from services.core.domain.errors import PolicyConfigError

Config = TypeVar("Config")

Default = bool | int | float | str | None | list[float] | list[list[float]]


@dataclass(frozen=True)
class ParameterDescription:
    """One parameter, described for people and for forms.

    Attributes:
        minimum, maximum: Inclusive bounds (of every element of a list), None where there is none.
    """

    name: str  #: The key in a policy's parameters
    type: str
    """``number``, ``integer``, ``boolean``, ``choice``, ``numbers`` (a list) or ``pairs`` (a list of lists of two
    numbers)."""
    default: Default  #: As JSON
    nullable: bool  #: Whether null is a value; the meaning says what it stands for
    minimum: float | None
    maximum: float | None
    unit: str  #: ``s``, ``GPUs`` and so on; empty for a pure number
    meaning: str  #: One sentence, with the source of the default
    choices: tuple[str, ...] = ()  #: The values of a ``choice``


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


def parameter(default: object, meaning: str, **more: Any) -> Any:
    """Return a field with this default; the rest as for ``Parameter``."""
    return field(default=default, metadata={Parameter.__name__: Parameter(meaning, **more)})


def check_parameters(config: object) -> None:
    """Check every field of a config against its declaration; call it from ``__post_init__``.

    Raises:
        PolicyConfigError: a wrong type, a NaN or infinity, or a value out of range, with a JSON pointer to it.
    """
    for name, kind, declared in _declarations(type(config)):
        _check(getattr(config, name), kind, declared, f"/{name}")


def build_config(config_type: type[Config], parameters: Mapping[str, object]) -> Config:
    """Return a config with the given parameters; the others keep their defaults.

    Raises:
        PolicyConfigError: an unknown key or a bad value, with a JSON pointer to it.
    """
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
    declared = [(name, parameter.formerly) for name, _, parameter in _declarations(config_type)]
    return {name: name for name, _ in declared} | {former: name for name, former in declared if former}


def _frozen(value: object) -> object:
    return tuple(map(_frozen, cast("list[object]", value))) if isinstance(value, list) else value


def describe_parameters(config_type: type) -> tuple[ParameterDescription, ...]:
    defaults = {declared.name: cast(object, declared.default) for declared in fields(config_type)}
    return tuple(
        ParameterDescription(
            name=name,
            type=kind.name,
            default=_as_json(defaults[name]),
            nullable=kind.nullable,
            minimum=declared.minimum,
            maximum=declared.maximum,
            unit=declared.unit,
            meaning=declared.meaning,
            choices=kind.choices,
        )
        for name, kind, declared in _declarations(config_type)
    )


@dataclass(frozen=True)
class _Kind:
    name: str
    nullable: bool = False
    choices: tuple[str, ...] = ()


def _as_json(default: object) -> Default:
    if not isinstance(default, tuple):
        return cast(Default, default)
    return cast(Default, [_as_json(each) for each in cast("tuple[object, ...]", default)])


def _declarations(config_type: type) -> list[tuple[str, _Kind, Parameter]]:
    hints = get_type_hints(config_type, include_extras=True)
    declarations: list[tuple[str, _Kind, Parameter]] = []
    for declared in fields(config_type):
        hint, described = hints[declared.name], declared.metadata.get(Parameter.__name__)
        if described is None:
            hint, described = get_args(hint)
        declarations.append((declared.name, _kind_of(hint), described))
    return declarations


def _kind_of(hint: Any) -> _Kind:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (kind,) = (_kind_of(argument) for argument in arguments if argument is not type(None))
        return _Kind(kind.name, nullable=True, choices=kind.choices)
    if origin is Literal:
        return _Kind("choice", choices=arguments)
    if origin is tuple:
        return _Kind("pairs" if get_origin(arguments[0]) is tuple else "numbers")
    return _Kind({float: "number", int: "integer", bool: "boolean"}[hint])


def _check(value: object, kind: _Kind, declared: Parameter, pointer: str) -> None:
    if value is None:
        if not kind.nullable:
            raise PolicyConfigError("null is not a value here", pointer)
    elif kind.name == "choice":
        if value not in kind.choices:
            raise PolicyConfigError(f"expected one of {', '.join(kind.choices)}, got {value!r}", pointer)
    elif kind.name == "boolean":
        if not isinstance(value, bool):
            raise PolicyConfigError(f"expected true or false, got {value!r}", pointer)
    elif kind.name == "numbers":
        if not isinstance(value, tuple):
            raise PolicyConfigError(f"expected a list of numbers, got {value!r}", pointer)
        for at, element in enumerate(cast("tuple[object, ...]", value)):
            _check_number(element, declared, integer=False, pointer=f"{pointer}/{at}")
    elif kind.name == "pairs":
        _check_pairs(value, declared, pointer)
    else:
        _check_number(value, declared, integer=kind.name == "integer", pointer=pointer)


def _check_pairs(value: object, declared: Parameter, pointer: str) -> None:
    """Check a list of pairs; the declared range applies to the second number of each."""
    if not isinstance(value, tuple):
        raise PolicyConfigError(f"expected a list of pairs, got {value!r}", pointer)
    for at, pair in enumerate(cast("tuple[object, ...]", value)):
        if not isinstance(pair, tuple) or len(cast("tuple[object, ...]", pair)) != 2:
            raise PolicyConfigError(f"expected two numbers, got {pair!r}", f"{pointer}/{at}")
        first, second = cast("tuple[object, object]", pair)
        _check_number(first, Parameter(""), integer=False, pointer=f"{pointer}/{at}/0")
        _check_number(second, declared, integer=False, pointer=f"{pointer}/{at}/1")


def _check_number(value: object, declared: Parameter, *, integer: bool, pointer: str) -> None:
    wanted = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float):
        raise PolicyConfigError(f"expected {wanted}, got {value!r}", pointer)
    if not _is_finite(value):
        raise PolicyConfigError(f"expected a finite number, got {value!r}", pointer)
    minimum, maximum = declared.minimum, declared.maximum
    if minimum is not None and value < minimum:
        raise PolicyConfigError(f"must be at least {minimum:g}, got {value!r}", pointer)
    if maximum is not None and value > maximum:
        raise PolicyConfigError(f"must be at most {maximum:g}, got {value!r}", pointer)


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _pointer(name: str) -> str:
    return "/" + name.replace("~", "~0").replace("/", "~1")
