"""What people are told of a name that is not there."""

from __future__ import annotations

import pytest

from services.contracts.invalid import no_such_zone


@pytest.mark.parametrize(
    ("zone", "known", "told"),
    [
        ("US-CAL-CISCO", ("DE", "US-CAL-CISO"), "did you mean US-CAL-CISO? The zones are DE, US-CAL-CISO."),
        ("de", ("DE", "US-CAL-CISO"), "There is no zone de; did you mean DE? "),
        ("ATLANTIS", ("DE", "GB"), "There is no zone ATLANTIS. The zones are DE, GB."),
        ("DE", (), "There is no zone DE. The zones are none."),
        ("Q", [f"Z{n:03}" for n in range(400)], "Z019 and 380 more."),
        ("x" * 5_000, ("DE",), f"There is no zone {'x' * 60}.... The zones are DE."),
    ],
)
def test_a_zone_that_is_not_there_is_told_with_the_nearest_names(zone: str, known: list[str], told: str) -> None:
    found = no_such_zone(zone, known)

    assert told in found
    assert len(found) < 400
