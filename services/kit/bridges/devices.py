"""Which GPUs jobs count as holding where their engine says only how many. Pure."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

Place = TypeVar("Place", bound=Hashable)


def numbered(
    wanted: Mapping[str, Mapping[Place, int]],
    sizes: Mapping[Place, int],
    held: Mapping[str, Mapping[Place, Sequence[int]]],
) -> dict[str, dict[Place, list[int]]]:
    """Return GPUs by job and place, each of one job; those that held some before keep them, and come first.

    Args:
        wanted: How many GPUs jobs want, by place; where there are fewer, the first have them.
        sizes: How many GPUs there are, by place; there are no others.
        held: The previous result.
    """
    free = {place: dict.fromkeys(range(size)) for place, size in sizes.items()}
    found: dict[str, dict[Place, list[int]]] = {}
    for name, places in sorted(wanted.items(), key=lambda each: each[0] not in held):
        for place, gpus in places.items():
            left = free.get(place, {})
            count = max(min(gpus, len(left)), 0)
            kept = [device for device in held.get(name, {}).get(place, ()) if device in left][:count]
            taken = [*kept, *islice((device for device in left if device not in kept), count - len(kept))]
            for device in taken:
                del left[device]
            if taken:
                found.setdefault(name, {})[place] = sorted(taken)
    return found
