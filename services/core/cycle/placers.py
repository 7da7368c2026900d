"""Every placer by name, for operators to choose from."""

from services.core.cycle.buddy import buddy
from services.core.cycle.graph_placing import first_fit_placing, heavy_edge_placing, refined_placing
from services.core.cycle.placing import Placer, consolidated

PLACERS: dict[str, Placer] = {
    "consolidated": consolidated,
    "buddy": buddy,
    "first-fit": first_fit_placing,
    "heavy-edge": heavy_edge_placing,
    "refined": refined_placing,
}
"""``consolidated`` fills the tightest node and spans as few as it can; ``buddy`` keeps to aligned blocks; the others go
by the job's graph (``graph_placing``)."""
