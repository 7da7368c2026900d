"""Every placer by name, for operators to choose from."""

from functools import partial

from services.core.cycle.buddy import buddy
from services.core.cycle.graph_placing import first_fit_placing, place_by_graph
from services.core.cycle.placing import Placer, consolidated
from services.core.domain.solving import Method

PLACERS: dict[str, Placer] = {
    "consolidated": consolidated,
    "buddy": buddy,
    "first-fit": first_fit_placing,
    "heavy-edge": partial(place_by_graph, method=Method.HEAVY_EDGE),
    "refined": partial(place_by_graph, method=Method.REFINED),
}
"""``consolidated`` fills the tightest node and spans as few as it can; ``buddy`` keeps to aligned blocks; the others go
by the job's graph (``graph_placing``)."""
