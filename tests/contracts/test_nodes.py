"""What agents and control planes of two releases say to each other."""

import pytest
from pydantic import ValidationError

from services.contracts.nodes import ControlsStatus, DeviceControls

MEASURED = {"elapsed_s": 2.0, "work": 1.0, "gpu_energy_j": 100.0, "marks": 2}


@pytest.mark.parametrize(("length", "measured"), [("slice_s", "slice"), ("interval_s", "interval")])
def test_an_interval_is_read_by_its_old_name_and_its_new_one(length: str, measured: str) -> None:
    controls = DeviceControls.model_validate({"revision": 1, length: 30.0})
    status = ControlsStatus.model_validate({"revision": 1, length: 30.0, measured: MEASURED})

    assert controls.interval_s == status.interval_s == 30.0
    assert status.interval is not None
    assert status.interval.marks == 2


def test_an_interval_is_written_by_the_name_that_the_previous_release_knows() -> None:
    status = ControlsStatus.model_validate({"revision": 1, "interval_s": 30.0, "interval": MEASURED})

    written = status.model_dump(mode="json")

    assert (written["slice_s"], written["slice"]["marks"]) == (30.0, 2)
    assert not {"interval", "interval_s"} & set(written)
    assert ControlsStatus.model_validate(written) == status


def test_a_name_that_neither_release_knows_is_refused() -> None:
    with pytest.raises(ValidationError, match="span_s"):
        DeviceControls.model_validate({"revision": 1, "span_s": 30.0})
