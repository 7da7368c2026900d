"""Guaranteed GPUs under every policy of the lab."""

from __future__ import annotations

import pytest

from lab.policies.entries import ENTRIES
from services.core.cycle.snapshot import Snapshot
from tests.properties.test_guarantees import (
    guaranteed,
    none_is_below_while_others_borrow,
    planned,
    stops_have_a_claimant_and_who_borrowed_last_gives_back_first,
    what_could_not_be_had_back_is_not_lent,
)
from tests.support.shared import shared


@pytest.mark.usefixtures("the_lab")
@pytest.mark.parametrize("name", ENTRIES)
@shared(snapshot=guaranteed())
def test_guarantees_are_kept(name: str, snapshot: Snapshot) -> None:
    seen = planned(name, snapshot)

    none_is_below_while_others_borrow(seen)
    stops_have_a_claimant_and_who_borrowed_last_gives_back_first(seen)
    what_could_not_be_had_back_is_not_lent(seen)
