"""Tests of the product, once more over the lab's policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import hypothesis
import pytest

EXAMPLES = 20
"""Of a property, at most; the policies that people run get as many as it asks for."""
OVER = {"name", "policy", "parameters"}


def again(test: Callable[..., None], cases: Iterable[Any]) -> Callable[..., None]:
    """Return a test over these cases, in place of the policies that it is parametrised over."""
    property_: Any = getattr(test, "hypothesis", None)
    inner: Any = test if property_ is None else property_.inner_test
    copy: Any = FunctionType(inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)
    for name in ("__kwdefaults__", "__annotations__", "__module__", "__qualname__", "__doc__"):
        setattr(copy, name, getattr(inner, name))
    if hasattr(inner, "__signature__"):  # of what is `shared`
        copy.__signature__ = inner.__signature__
    if property_ is not None:
        usual: Any = test._hypothesis_internal_use_settings  # type: ignore[attr-defined]
        fewer = hypothesis.settings(usual, max_examples=min(usual.max_examples, EXAMPLES))
        copy = fewer(hypothesis.given(**property_._given_kwargs)(copy))
    marks: list[pytest.Mark] = test.pytestmark  # type: ignore[attr-defined]
    (replaced,) = (each for each in marks if each.name == "parametrize" and _names(each) & OVER)
    kept = [each for each in marks if each is not replaced]
    copy.pytestmark = [*kept, pytest.mark.parametrize(replaced.args[0], list(cases)).mark]
    return copy


def _names(mark: pytest.Mark) -> set[str]:
    names = mark.args[0]
    return {name.strip() for name in names.split(",")} if isinstance(names, str) else set(names)
