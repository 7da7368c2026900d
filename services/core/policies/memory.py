"""What policies remember, as JSON values and back: frozen dataclasses with a default for every field."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

Memory = TypeVar("Memory")


def dumped(memory: Any) -> dict[str, Any]:
    """Return the fields as what JSON writes; tuples come back from it as lists, which ``loaded`` takes."""
    found = ((each.name, getattr(memory, each.name)) for each in fields(memory))
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in found}  # pyright: ignore[reportUnknownArgumentType]


def loaded(kind: Callable[[], Memory], stored: Mapping[str, Any]) -> Memory:
    """Return the memory from which ``dumped`` made these values; missing fields have their defaults."""
    new: Any = kind()
    values = {each.name: stored[each.name] for each in fields(new) if each.name in stored}
    for name, value in values.items():
        match getattr(new, name):
            case frozenset():
                values[name] = frozenset(value)
            case Mapping():
                values[name] = {key: tuple(each) if isinstance(each, list) else each for key, each in value.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            case _:
                pass
    return type(new)(**values)
