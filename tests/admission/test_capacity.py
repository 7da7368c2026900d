"""Which jobs on slices no cluster of these GPUs could ever run."""

import pytest

from services.admission.capacity import DeviceKind, impossibility
from services.contracts.jobs import GpuRequest

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
        ({"model": "A100"}, [SLICES], "/gpus/model"),
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
    ],
)
def test_a_gang_that_is_too_large_learns_how_large_one_may_be(gpus, said) -> None:
    found = impossibility(GpuRequest.model_validate(gpus), [WHOLE, OTHER])

    assert found is not None
    assert found.detail == said
