"""Ten hours of an order, smaller: as kept as on the page."""

import pytest

from lab.reproductions.orders import ordered


@pytest.mark.parametrize("policy", ["fifo", "las", "joint"])
def test_an_order_is_kept_while_jobs_come_and_go(policy: str) -> None:
    without, under = ordered(policy, 32, 5.0)
    (kept,) = under.orders
    assert kept["reached_s"] <= 10
    assert kept["above_most"] <= 0.02
    assert kept["below_most"] <= 0.02
    assert kept["rebound"] <= 0.05
    slower = under.columns.gpu_s / without.columns.gpu_s - 1
    hard = slice(16)
    assert slower[hard].max() <= 0.01
    assert slower[16:].max() > 0.01
