"""Hours of a grid, as inference simulations read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.inference.hours import read_hours
from services.core.domain.errors import DomainError


def test_the_papers_traces_have_49_hours() -> None:
    assert read_hours("ciso-march", 49)[0][0] == 124.57
    values, notes = read_hours("eso-march", 49)
    assert (values[:2].tolist(), notes) == ([97, 71], ())


def test_a_column_may_lack_a_header_and_a_grids_file_has_times(written: Callable[..., Path]) -> None:
    plain = written("plain.csv", "100", "200.5")
    timed = written("timed.csv", "time,gco2", "2024-01-01T00:00Z,300", "2024-01-01T02:00Z,400")

    values, notes = read_hours(str(plain), 2)
    assert (values.tolist(), notes) == ([100, 200.5], ("'plain.csv' states no unit: taken as gCO2/kWh",))
    values, notes = read_hours(str(timed), 3)
    assert values.tolist() == [300, 300, 400]
    assert notes[0] == "timed.csv: read as plain; 2 of 2 rows kept"


def test_the_header_of_a_column_may_state_its_unit(written: Callable[..., Path]) -> None:
    values, notes = read_hours(str(written("plain.csv", "kg/kWh", "0.1", "0.2")), 2)

    assert values.tolist() == pytest.approx([100, 200])
    assert notes == ("kg/kWh: converted to gCO2/kWh, times 1000",)
    with pytest.raises(DomainError, match="a unit that is not understood"):
        read_hours(str(written("plain.csv", "kg/MJ", "0.1", "0.2")), 2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("zone", "100", "much"), "line 3: the intensity is not a number"),
        (("zone", "100", "nan"), "hour 1 must be a number above 0"),
        (("zone", "100", "", "90"), "hour 1 must be a number above 0"),
        (("zone", "100", "-5"), "hour 1 must be a number above 0"),
        (("zone", "100", "1e6"), "the intensity of hour 1, 1e\\+06 gCO2/kWh, is none of a grid"),
        (("zone", "100"), "has 1 hours"),
        (("zone",), "has 0 hours"),
        (("a,b,c", "1,2,3"), "not a known carbon file"),
    ],
)
def test_a_bad_trace_is_named(written: Callable[..., Path], lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(DomainError, match=message):
        read_hours(str(written("trace.csv", *lines)), 2)
