"""Which jobs on slices no cluster of these GPUs could ever run."""

import pytest

from services.admission.capacity import DeviceKind, impossibility, kinds_of
from services.contracts.jobs import GpuRequest
from services.core.domain.topology import Topology, read_topology

WHOLE = DeviceKind("A100", 40, "DE", 4)
CUTTABLE = DeviceKind("A100", 40, "DE", 4, can_cut=True)
SLICES = DeviceKind("A100", 20, "DE", 2, sevenths=3, is_slice=True)
OTHER = DeviceKind("V100", 32, "DE", 8)
ABROAD = DeviceKind("A100", 40, "SE", 6)
LARGER = DeviceKind("A100", 80, "DE", 4)


@pytest.mark.parametrize(
    ("gpus", "capacity", "pointer"),
    [
        ({"slice": "3g"}, [], None),
        ({"slice": "3g"}, [WHOLE, SLICES], None),
        ({"slice": "2g"}, [WHOLE, SLICES], "/gpus/slice"),
        ({"slice": "2g"}, [CUTTABLE], None),
        ({"slice": "2g", "model": "V100"}, [CUTTABLE, OTHER], "/gpus/slice"),
        ({"slice": "2g", "model": "H100"}, [CUTTABLE, OTHER], "/gpus/model"),
        ({"slice": "3g", "memory_gib": 24.0}, [WHOLE, SLICES], "/gpus/memory_gib"),
        ({"min": 5}, [WHOLE, SLICES], "/gpus/min"),
        ({"min": 4}, [WHOLE, SLICES], None),
        ({"model": "A100"}, [SLICES], "/gpus/slice"),
        ({}, [SLICES], "/gpus/slice"),
        ({"min": 7}, [WHOLE, ABROAD, LARGER], "/gpus/min"),
        ({"min": 6}, [WHOLE, ABROAD, LARGER], None),
        ({"min": 5, "zone": "DE"}, [WHOLE, ABROAD], "/gpus/min"),
        ({"min": 5, "zone": "SE"}, [WHOLE, ABROAD], None),
        ({"model": "V100", "zone": "SE"}, [OTHER, ABROAD], "/gpus/model"),
        ({"zone": "FR"}, [WHOLE, ABROAD], "/gpus/zone"),
        ({"zone": "FR", "slice": "3g"}, [WHOLE, SLICES], "/gpus/zone"),
    ],
)
def test_a_job_waits_only_for_what_could_come(gpus, capacity, pointer) -> None:
    found = impossibility(GpuRequest.model_validate(gpus), capacity)

    assert (None if found is None else found.pointer) == pointer


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ({"min": 99}, "The gang needs 99 GPUs; the cluster has at most 8 of one kind in one zone."),
        ({"min": 99, "model": "A100"}, "The gang needs 99 GPUs; the cluster has 4 such GPUs."),
        ({"zone": "SE"}, "No node of the cluster is in the grid zone SE; the zones there are: DE."),
        ({"model": "H100"}, "No node of the cluster has a GPU of model H100; the models there are: A100, V100."),
        (
            {"model": "a100", "zone": "DE", "slice": "3g"},
            "No node in the grid zone DE has a GPU of model a100; the models there are: A100, V100.",
        ),
        ({"memory_gib": 48.0}, "No such GPU of the cluster has 48 GiB of memory; the largest has 40 GiB."),
        (
            {"memory_gib": 24.0, "slice": "3g"},
            "No such slice of the cluster has 24 GiB of memory; the largest has 20 GiB.",
        ),
    ],
)
def test_what_is_refused_names_what_there_is(gpus, said) -> None:
    found = impossibility(GpuRequest.model_validate(gpus), [WHOLE, OTHER, SLICES])

    assert found is not None
    assert found.detail == said


NODES = [(f"n{at}", {}, DeviceKind("A100", 40, "DE", 4)) for at in range(4)]
FILE = read_topology("rack r1: n[0-1]\nrack r2: n2\nblock a: r1, r2")


@pytest.mark.parametrize(
    ("gpus", "file", "pointer", "said"),
    [
        ({"min": 8, "within": "rack"}, FILE, None, ""),
        ({"min": 9, "within": "rack"}, FILE, "/gpus/min", "within one rack; none has more than 8 such GPUs"),
        ({"min": 12, "within": "block"}, FILE, None, ""),
        ({"min": 13, "within": "block"}, FILE, "/gpus/min", "none has more than 12"),
        ({"min": 5, "within": "node"}, Topology(), "/gpus/min", "within one node; none has more than 4"),
        ({"min": 4, "within": "node"}, Topology(), None, ""),
        ({"within": "rack"}, Topology(), "/gpus/within", "no level rack; it has node."),
        ({"slice": "3g", "within": "rack"}, Topology(), "/gpus/within", "no level rack; it has node."),
        ({"near": "pod"}, FILE, "/gpus/near", "no level pod; it has node, rack, block."),
        ({"min": 16, "near": "rack"}, FILE, None, ""),
        ({"min": 17, "within": "rack"}, FILE, "/gpus/min", "the cluster has 16 such GPUs"),
    ],
)
def test_a_gang_that_no_domain_could_hold_is_refused(gpus, file, pointer, said) -> None:
    found = impossibility(GpuRequest.model_validate(gpus), kinds_of(NODES, file))

    assert (None if found is None else found.pointer) == pointer
    assert found is None or said in found.detail


def test_the_largest_domain_is_that_of_one_kind() -> None:
    mixed = [*NODES[:1], ("n1", {}, DeviceKind("V100", 32, "DE", 4)), ("n1", {}, DeviceKind("A100", 40, "DE", 1))]

    by_model = {kind.model: (kind.count, kind.largest["rack"]) for kind in kinds_of(mixed, FILE)}

    assert by_model == {"A100": (5, 5), "V100": (4, 4)}
