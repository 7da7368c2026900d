"""`shared`: Hypothesis' `given` for what is asked of many policies: examples are drawn once and tried on each.

To draw a cluster takes about ten times as long as to ask a policy what it would do with it. Where an example fails,
Hypothesis looks for the smallest that does, as ever.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption


def shared(
    chosen: settings | None = None, /, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a test that is parametrised over policies, to be given what these strategies draw."""

    @functools.cache
    def examples() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        _run(lambda **drawn: found.append(drawn), strategies, chosen)
        return found

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**values: Any) -> None:
            for example in examples():
                try:
                    with contextlib.suppress(UnsatisfiedAssumption):
                        test(**values, **example)
                except Exception:
                    _run(functools.partial(test, **values), strategies, chosen)
                    raise

        whole = inspect.signature(test)
        left = [each for name, each in whole.parameters.items() if name not in strategies]
        run.__signature__ = whole.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate


def _run(test: Callable[..., None], strategies: dict[str, st.SearchStrategy[Any]], chosen: settings | None) -> None:
    def each(**drawn: Any) -> None:
        test(**drawn)

    (chosen or settings())(given(**strategies)(each))()
