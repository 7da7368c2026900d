"""Which instances belong on which GPU. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, PlainSerializer

from services.contracts.serving import InstanceState
from services.core.policies.clover.layouts import LAYOUT_COUNTS, LAYOUTS, counts_of

Gpu = tuple[str, int]  #: Node and index
Sizes = tuple[int, ...]  #: Slices of a GPU in sevenths, the largest first; none: it is whole
Kind = tuple[str, str, str]  #: Application, variant and slice, the slice as ``2g``; ``7g`` is a whole GPU


def _by_gpu(triples: Iterable[tuple[str, int, Any]]) -> dict[Gpu, Any]:
    return {(node, gpu): value for node, gpu, value in triples}


def _triples(by_gpu: Mapping[Gpu, Any]) -> list[Any]:
    return [[*gpu, value] for gpu, value in sorted(by_gpu.items())]


V = TypeVar("V")
ByGpu = Annotated[Mapping[Gpu, V], BeforeValidator(_by_gpu), PlainSerializer(_triples)]
"""Stored as triples of node, index and value."""
Assignment = ByGpu[tuple[Kind, ...]]

WHOLE = "7g"
UNKNOWN: Sizes = (0,)
"""Of a GPU that can be cut and has no slice, so that nothing runs on it."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU of a fleet."""

    at: Gpu
    sizes: Sizes  #: How it is cut, according to its node's devices
    wanted: Sizes  #: How it is to be cut
    state: str  #: How far the node is with that: ``pending``, ``busy``, ``applied`` or ``failed``
    is_up: bool  #: Whether its node is up and accepts work
    detail: str = ""
    used_by: str | None = None  #: A job from outside the fleet that still runs on it; None if there is none
    fits: bool = True  #: Whether it is still of the model, the zone and the labels that its fleet is to have

    @property
    def is_usable(self) -> bool:
        """Whether instances can run there now."""
        return self.is_up and self.used_by is None


@dataclass(frozen=True, slots=True)
class Placed:
    """An instance that has not ended, and the GPU that it holds all or a slice of; None before it holds any."""

    id: str
    kind: Kind
    state: InstanceState
    gpu: Gpu | None


def ordered(sizes: Iterable[int]) -> Sizes:
    """Return sizes in canonical order, for comparison."""
    return tuple(sorted(sizes, reverse=True))


def sizes_of(layout: int) -> Sizes:
    """Return the slices of a layout, 1 to 19; none for layout 1, which is the whole GPU."""
    return () if layout == 1 else ordered(LAYOUTS[layout - 1])


def layout_of(sizes: Sizes) -> int:
    """Return the layout, 1 to 19, that has these slices; 1 if none has exactly these."""
    counts = counts_of(sizes) if sizes and sizes != UNKNOWN else counts_of([7])
    if counts not in LAYOUT_COUNTS:
        return 1
    return 1 + next(at for at, each in enumerate(LAYOUTS) if counts_of(each) == counts)


def slots_of(sizes: Sizes) -> Counter[str]:
    """Return how many instances a GPU can hold, by slice."""
    if sizes == UNKNOWN:
        return Counter()
    return Counter(f"{size}g" for size in sizes) if sizes else Counter({WHOLE: 1})


def fitting(kinds: Iterable[Kind], sizes: Sizes) -> tuple[Kind, ...]:
    """Return which of these instances fit on a GPU that is cut like this."""
    free, found = slots_of(sizes), list[Kind]()
    for kind in kinds:
        if free[kind[2]] > 0:
            free[kind[2]] -= 1
            found.append(kind)
    return tuple(found)


def assign(
    layouts: Mapping[Gpu, Sizes], wanted: Mapping[Kind, int], sizes: Mapping[Gpu, Sizes], present: Assignment
) -> dict[Gpu, tuple[Kind, ...]]:
    """Return which instances belong on which GPU, so that as few as possible move.

    Args:
        layouts: How the GPUs are to be cut.
        wanted: How many instances of each kind there should be; the layouts must hold them.
        sizes: How the GPUs are cut now.
        present: Which instances belong on them now.
    """
    left = Counter(dict(wanted))
    found: dict[Gpu, list[Kind]] = {gpu: [] for gpu in layouts}
    for gpu, target in layouts.items():
        if sizes.get(gpu) == target:
            for kind in fitting(present.get(gpu, ()), target):
                if left[kind] > 0:
                    left[kind] -= 1
                    found[gpu].append(kind)
    free = {gpu: slots_of(target) - Counter(kind[2] for kind in found[gpu]) for gpu, target in layouts.items()}
    # Slices that are free now are filled first, and then GPUs on which nothing is: nobody has to leave for those.
    empty: dict[Gpu, Counter[str]] = {
        gpu: slots_of(target) - Counter(kind[2] for kind in present.get(gpu, ()))
        for gpu, target in layouts.items()
        if sizes.get(gpu) == target
    }

    def cost(gpu: Gpu, size: str) -> tuple[bool, bool, bool, Gpu]:
        is_cut_anew = sizes.get(gpu) != layouts[gpu]
        return gpu not in empty or not empty[gpu][size], bool(present.get(gpu)), is_cut_anew, gpu

    for kind in sorted(left.elements()):
        gpu = min((gpu for gpu in layouts if free[gpu][kind[2]] > 0), key=lambda gpu, size=kind[2]: cost(gpu, size))
        if gpu in empty:
            empty[gpu] -= Counter([kind[2]])
        free[gpu][kind[2]] -= 1
        found[gpu].append(kind)
    return {gpu: tuple(sorted(kinds)) for gpu, kinds in found.items()}


def base(
    gpus: Sequence[Gpu], loads: Mapping[tuple[str, str], float], present: Assignment | None = None
) -> dict[Gpu, tuple[Kind, ...]]:
    """Return BASE: every application's most accurate variant on whole GPUs, in proportion to its load.

    Args:
        loads: How many GPUs each variant keeps busy, by application and variant.
        present: Which instances belong on them now; as many as possible stay.
    """
    counts = dict.fromkeys(loads, 0)
    for _ in gpus:
        if not counts:
            break
        # each has one first; then the one that is busiest per GPU gets the next
        counts[max(counts, key=lambda each: (counts[each] == 0, loads[each] / max(counts[each], 1), each))] += 1
    wanted = {(*each, WHOLE): count for each, count in counts.items()}
    return assign(dict.fromkeys(gpus, ()), wanted, dict.fromkeys(gpus, ()), present or {})


def with_base_of(newcomers: Iterable[Kind], free: Iterable[Gpu], present: Assignment) -> dict[Gpu, tuple[Kind, ...]]:
    """Return the assignment with one instance of each newcomer added on a free GPU, as long as these last."""
    return {**present, **{gpu: (kind,) for gpu, kind in zip(free, newcomers, strict=False)}}
