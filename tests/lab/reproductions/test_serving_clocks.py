"""What the tables on clocks count."""

from __future__ import annotations

import numpy as np

from lab.reproductions.serving_clocks import beyond_limits, with_idle_boards
from lab.serving.accounting import ServedRequests
from lab.serving.simulation import Outcome
from lab.serving.site import papers_pools
from services.core.domain.serving import CLASSES


def test_a_request_is_held_against_the_limits_of_its_class() -> None:
    first_s, finish_s = np.array([0.31, 0.31, 0.2, 0.2]), np.array([0.4, 0.4, 1.8, 1.6])
    classes = np.array([CLASSES.index(name) for name in ("SS", "LS", "SS", "SS")])
    tokens = np.full(4, 11)
    served = ServedRequests(np.zeros(4), first_s, finish_s, tokens, np.ones(4))
    found = Outcome(served, classes, np.zeros(4), np.zeros(4), 0, 1.0, 1.0, 0, 1.0, 2.0)

    slow_start, slow_tokens = beyond_limits(found)

    assert slow_start.tolist() == [True, False, False, False]
    assert slow_tokens.tolist() == [False, False, True, False]


def test_idle_instances_draw_what_their_boards_draw() -> None:
    idle_w = {mode.name: mode.idle_w for mode in with_idle_boards(papers_pools()).modes}

    assert idle_w["A100_TP8"] == 4 * (idle_w["A100_TP2"] or 0) > 0
