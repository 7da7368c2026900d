"""What is sifted out changes no decision: with and without ``cycle.sifting``, rounds come to the same plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from services.core.cycle import ranking as ranking_module
from services.core.cycle import reconcile as reconciling
from services.core.cycle import sifting
from services.core.cycle.plan import Plan
from services.core.cycle.ranking import rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, contenders
from services.core.cycle.snapshot import Phase, Snapshot
from tests.support.builders import a_job, a_node, a_snapshot

ROUNDS = 60
"""By seed."""


@contextmanager
def nothing_sifted() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (reconciling, ranking_module):
            stack.enter_context(patch.object(module, "has_nothing_to_do", lambda *_: False))
        stack.enter_context(patch.object(ranking_module, "within_reach", lambda *_, **__: None))
        stack.enter_context(patch.object(reconciling, "sifted", lambda _, order, gpus, *__, **___: (order, gpus)))
        stack.enter_context(patch.object(reconciling, "starts_of_few", lambda *_, **__: None))
        yield


def a_round(draw: random.Random) -> Snapshot:
    """Return a cluster of mostly one kind of GPU, with more small jobs that wait than it has room for."""
    sizes = [draw.choice((1, 2, 4)) for _ in range(draw.randint(1, 3))]
    model = draw.choices(("A100", "V100"), (19, 1))[0]
    nodes = [
        a_node(f"n{at}", gpus=gpus, model=model if at == 1 else "A100", schedulable=draw.random() < 0.97)
        for at, gpus in enumerate(sizes)
    ]
    left = sum(node.gpus for node in nodes if node.model == "A100")
    runs, wishes = draw.choice((3, 40)), draw.random() < 0.2
    jobs = []
    for at in range(draw.randint(0, 12)):
        gpus = draw.choices((1, 2, 3), (8, 2, 1))[0]
        phase = draw.choices((Phase.QUEUED, Phase.RUNNING, Phase.STARTING, Phase.PREEMPTING), (6, runs, 1, 1))[0]
        holds = phase is not Phase.QUEUED and gpus <= left
        left -= gpus if holds else 0
        job = a_job(
            f"j{at}",
            gpus=gpus if holds else 0,
            phase=phase if holds else Phase.QUEUED,
            min_gpus=gpus,
            max_gpus=gpus + draw.choice((0, 0, 1)),
            models=None if holds else draw.choices((None, ("A100",), ("V100",)), (18, 1, 1))[0],
            tenant=draw.choice("ab"),
            priority=draw.randint(0, 1) if wishes else 0,
            preemptible=draw.random() < 0.8,
            submitted_s=float(draw.randint(0, 3)),
        )
        jobs.append(job)
    return a_snapshot(jobs, nodes, quota={"a": draw.randint(0, 3)} if draw.random() < 0.25 else None)


@pytest.mark.parametrize("few", [0, 3, sifting.FEW])
@pytest.mark.parametrize("seed", range(8))
def test_rounds_decide_the_same_without_sifting(seed: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(sifting, "MANY", 0)  # what is for thousands of jobs happens to the few of an example
    monkeypatch.setattr(sifting, "FEW", few)
    for _ in range(ROUNDS):
        snapshot = replace(a_round(draw), reasons=draw.random() < 0.2)
        preemption, backfill = draw.choice(list(Preemption)), draw.random() < 0.6
        most = draw.choice((2, 30))
        jobs, which = snapshot.jobs, contenders(snapshot, preemption)
        sizes = draw.choice([jobs.min_gpus, np.where(jobs.gpus > 0, jobs.gpus, jobs.min_gpus), jobs.max_gpus])[which]
        keys = np.array([draw.randint(0, most) for _ in which], dtype=np.int64), jobs.submitted_s[which]

        def decided() -> Plan:
            ranking = rank(snapshot, which, sizes, *keys, preemption=preemption, backfill=backfill)  # noqa: B023
            return reconcile(snapshot, ranking, preemption=preemption, backfill=backfill)  # noqa: B023

        quick = decided()
        with nothing_sifted():
            assert decided() == quick
