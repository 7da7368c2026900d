"""What the product's objects keep: every collection that is reached from one of them, and how much it has.

Whatever a request, a node or an instance leaves behind once it is over grows for ever, though no single place is
wrong. So a scenario asks at its end what is still kept, of all objects at once, instead of naming collections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

PRODUCT = ("services.", "gpu_agent.", "gateway.")
MESSAGES = "services.contracts."
COLLECTIONS = (dict, list, set, frozenset, deque)


def kept(root: Any, *, but: Collection[str] = ()) -> dict[str, int]:
    """Return how much each collection has that is not empty, by the class and the attribute that have it.

    Args:
        root: Where to begin.
        but: Those that may keep something, such as what is known of the present table: ``Class.attribute``.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    for name, collection in _collections(root, seen) if _is_ours(type(root)) else ():
        if collection and name not in but:
            found[name] = found.get(name, 0) + len(collection)
    return found


def _collections(each: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(each) in seen:
        return
    seen.add(id(each))
    for name in [*getattr(each, "__dict__", ()), *_slots(type(each))]:
        value = getattr(each, name, None)
        if isinstance(value, COLLECTIONS):
            yield f"{type(each).__name__}.{name}", value
            for one in list(value.values() if isinstance(value, dict) else value):
                if _is_ours(type(one)):
                    yield from _collections(one, seen)
        elif _is_ours(type(value)):
            yield from _collections(value, seen)


@cache
def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(PRODUCT) and not kind.__module__.startswith(MESSAGES) and kind is not type


@cache
def _slots(kind: type) -> tuple[str, ...]:
    slots = [each.__dict__.get("__slots__", ()) for each in kind.__mro__]
    return tuple(name for each in slots for name in ((each,) if isinstance(each, str) else each))
