"""Energy that a bridge books by the models of GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from services.contracts.codes import ProblemCode
from services.contracts.engines import EngineNode
from services.kit.bridges.energy import ModelledEnergy
from services.kit.problems import ProblemError
from tests.engines.plane import Plane

NODES = [EngineNode(name=name, gpus=1, gpu_model="H100", memory_gib=80, queues=[]) for name in ("g1", "g2")]


class Refusing(Plane):
    """A control plane that takes no energy of the first node."""

    refusal: ProblemError | None = None
    asked = 0

    async def call(self, what: str, report: Any, answer: Any, timeout_s: float) -> Any:
        self.asked += 1
        if self.refusal is not None and report.node == "g1":
            raise self.refusal
        return await super().call(what, report, answer, timeout_s)


@pytest.mark.parametrize(
    ("refusal", "later"),
    [
        (ProblemError(404, ProblemCode.NOT_FOUND, "There is no such node."), 1),
        (ProblemError(503, ProblemCode.UNKNOWN_ZONE, "No intensity of its zone is known."), 3),
        (ProblemError(500, ProblemCode.INTERNAL, "It broke."), 3),
    ],
    ids=["unknown node", "unknown zone", "a fault"],
)
async def test_a_node_whose_energy_is_not_taken_costs_no_other_node_its_own(refusal: ProblemError, later: int) -> None:
    plane, energy = Refusing(), ModelledEnergy(60.0)
    plane.refusal = refusal
    for now_s in (60.0, 120.0, 180.0):
        await energy.book(plane, NODES, (), now_s)  # pyright: ignore[reportArgumentType]
    assert [(each.node, len(each.intervals)) for each in plane.energy] == [("g2", 1), ("g2", 1)]

    plane.refusal = None
    await energy.book(plane, NODES, (), 240.0)  # pyright: ignore[reportArgumentType]
    assert ("g1", later) in [(each.node, len(each.intervals)) for each in plane.energy]


async def test_a_control_plane_that_does_not_answer_is_asked_once() -> None:
    plane, energy = Refusing(), ModelledEnergy(60.0)
    plane.silent = True
    for now_s in (60.0, 120.0):
        await energy.book(plane, NODES, (), now_s)  # pyright: ignore[reportArgumentType]
    assert plane.asked == 1

    plane.silent = False
    await energy.book(plane, NODES, (), 180.0)  # pyright: ignore[reportArgumentType]
    assert [(each.node, len(each.intervals)) for each in plane.energy] == [("g1", 2), ("g2", 2)]
