"""What the product's objects keep: every collection that is reached from one of them, and how much it has.

Whatever a request, a node or an instance leaves behind once it is over grows for ever, though no single place is
wrong. So a scenario asks at its end what is still kept, of all objects at once, instead of naming collections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
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
    for name, collection in _collections(root, seen):
        if collection and name not in but:
            found[name] = found.get(name, 0) + len(collection)
    return found


def _collections(each: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    room = type(each).__module__
    if id(each) in seen or isinstance(each, type) or not room.startswith(PRODUCT) or room.startswith(MESSAGES):
        return
    seen.add(id(each))
    names = [*getattr(each, "__dict__", ()), *(name for kind in type(each).__mro__ for name in _slots(kind))]
    for name in names:
        value = getattr(each, name, None)
        if isinstance(value, COLLECTIONS):
            yield f"{type(each).__name__}.{name}", value
            values = value.values() if isinstance(value, dict) else value
            for one in list(values):
                yield from _collections(one, seen)
        else:
            yield from _collections(value, seen)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
