"""Validation errors in plain words: what is wrong with a field, and what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from services.core.domain.counted import counted

if TYPE_CHECKING:  # the command line looks at names without it
    from pydantic import ValidationError

NAME_RULE = "must be 1 to 63 letters, digits, '.', '-' or '_', the first of them a letter or digit"
JOB_NUMBER = r"([1-9]\d{0,17})(?:\.(\d{1,6}))?"
"""A job or an array by its number, and a task by that of its array and its index; a name that is equal comes first."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
LABEL_PATTERN = r"^[^\x00=]{1,63}=[^\x00]{0,255}$"
_RULES = {
    NAME_PATTERN: NAME_RULE,
    VARIABLE_PATTERN: "must be the name of a variable: up to 128 letters, digits and '_', the first of them no digit",
    LABEL_PATTERN: "must be KEY=VALUE, of at most 63 and 255 characters",
}
_LONGEST_SHOWN = 60
_MAY_BE_SECRET = frozenset(("command", "environment", "password", "secret", "secrets", "token", "url", "value"))
"""Fields whose values, and those of what is in them, no message repeats."""
_MOST_NAMED = 20

_KINDS = {
    kind: words
    for words, kinds in {
        "a whole number": ("int_type", "int_parsing", "int_from_float"),
        "a number": ("float_type", "float_parsing"),
        "a finite number": ("finite_number",),
        "true or false": ("bool_type", "bool_parsing"),
        "text": ("string_type",),
        "text that UTF-8 can hold": ("string_unicode",),
        "a list": ("list_type",),
        "an object with named fields": ("dict_type", "model_type", "model_attributes_type"),
        "an ISO 8601 date and time, such as 2026-03-01T12:00:00Z": (
            *("datetime_type", "datetime_parsing", "datetime_from_date_parsing"),
        ),
        "a time with a time zone, such as 2026-03-01T12:00:00Z": ("timezone_aware",),
    }.items()
    for kind in kinds
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("greater than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def explained(error: Mapping[str, Any]) -> str:
    """Return one of Pydantic's errors as what is wrong and what would be right, without the name of the field.

    The given value is repeated if the error has it, it is short, and the field cannot hold a secret.
    """
    kind = str(error["type"])
    context: Mapping[str, Any] = error.get("ctx") or {}
    given = "" if "input" not in error or _MAY_BE_SECRET.intersection(error["loc"]) else _shown(error["input"])
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return "is not a known field; check its spelling"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}{given}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        number = _shown(error.get("input", [])).replace("'", "")  # no secret; a query has it as text
        return f"must be {words} {context[bound]}{number}"
    if kind in ("literal_error", "enum"):
        choices = re.sub(r"<[^:]+: (.+?)>", r"\1", str(context["expected"]))  # an enumeration's members as values
        return f"must be {choices}{given}"
    if kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        return f"{_RULES.get(pattern, f'must match {pattern}')}{given}"
    if kind in ("too_short", "string_too_short"):
        return f"must have at least {_counted(context['min_length'], kind)}"
    if kind in ("too_long", "string_too_long"):
        return f"may have at most {_counted(context['max_length'], kind)}"
    return str(error["msg"]).removeprefix("Value error, ")


def field_of(location: Sequence[int | str]) -> str:
    """Return a field's place as people write it: ``jobs[0].gpus.min``; empty for the whole document."""
    words = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return words.removeprefix(".")


def first_error(error: ValidationError, *, whole: str = "") -> str:
    """Return the first error as ``field: what is wrong, and what would be right``, on one line.

    Args:
        whole: What to call the document itself, for an error of no single field.
    """
    first = error.errors()[0]
    field = field_of(first["loc"]) or whole
    return f"{field}: {explained(first)}" if field else explained(first)


def no_such_zone(zone: str, known: Iterable[str]) -> str:
    """Return a sentence that there is no such grid zone, with the zones of similar names and those that exist."""
    names = sorted(known)
    by_folded = {name.casefold(): name for name in names}
    near = [by_folded[each] for each in difflib.get_close_matches(zone.casefold()[:_LONGEST_SHOWN], by_folded, n=3)]
    listed = ", ".join(names[:_MOST_NAMED])
    rest = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    name = zone if len(zone) <= _LONGEST_SHOWN else f"{zone[:_LONGEST_SHOWN]}..."
    return f"There is no zone {name}{meant} The zones are {listed or 'none'}{rest}."


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return f", not {'null' if value is None else str(value).lower()}"
    if not isinstance(value, str | int | float):
        return ""
    shown = repr(value)
    return f", not {shown}" if len(shown) <= _LONGEST_SHOWN else f", not {shown[:_LONGEST_SHOWN]}..."


def _counted(count: int, kind: str) -> str:
    return counted(count, "character") if kind.startswith("string") else counted(count, "entry", "entries")
