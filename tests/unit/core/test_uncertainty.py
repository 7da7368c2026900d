"""The 90 % interval beside a figure covers the truth 9 times out of 10, on planted errors of meters and intensities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from services.core.accounting.uncertainty import GUESSED, METERED, MODELLED, PUBLISHED, Cell, half_widths

SEEDS = 4_000
Z90 = 1.6448536269514722
"""A normal error is within so many standard deviations 9 times out of 10."""


@dataclass(frozen=True)
class Line:
    """A line of the ledger as it is booked; energies in joules."""

    job: int
    node: int
    metered_j: float
    modelled_j: float
    intensity: float
    guessed: bool

    @property
    def zone(self) -> int:
        return self.node % 3

    def cell(self, meter: str) -> Cell:
        energy_j = self.metered_j + self.modelled_j
        carbon = energy_j / 3.6e6 * self.intensity
        return Cell(meter, f"z{self.zone}", energy_j, self.modelled_j, carbon, carbon if self.guessed else 0.0)


def a_ledger(modelled: float) -> list[Line]:
    """Two weeks of 24 jobs of 4 projects on 8 nodes in 3 zones; each job is on one to three nodes."""
    draw = np.random.default_rng(5)
    return [
        Line(
            job,
            int(node),
            watts := draw.uniform(1e6, 9e6),
            modelled * watts,
            draw.uniform(50, 700),
            draw.random() < 0.2,
        )
        for job in range(24)
        for node in draw.choice(8, size=1 + job % 3, replace=False)
        for _ in range(14)
    ]


def coverage(lines: Sequence[Line], meter: Callable[[Line, int], str]) -> tuple[float, float]:
    """Return how often energy and emissions of these lines are within their half-widths of the truth.

    The truth is what a meter shows times 1 + its error; a node has one meter, a zone one provider, the site one model.
    """
    draw = np.random.default_rng(11)

    def errors(count: int, half_width: float) -> np.ndarray:
        return 1 + draw.normal(0, half_width / Z90, (SEEDS, count))

    by_node, by_model = errors(8, METERED), errors(1, MODELLED)[:, 0]
    by_zone = (errors(3, 1.0) - 1)[:, :, np.newaxis] * np.array([PUBLISHED, GUESSED]) + 1
    energy_j, carbon = np.zeros(SEEDS), np.zeros(SEEDS)
    for line in lines:
        true_j = line.metered_j * by_node[:, line.node] + line.modelled_j * by_model
        energy_j += true_j
        carbon += true_j / 3.6e6 * line.intensity * by_zone[:, line.zone, int(line.guessed)]
    cells = [line.cell(meter(line, at)) for at, line in enumerate(lines)]
    found = half_widths(cells)
    booked_j, booked = sum(cell.energy_j for cell in cells), sum(cell.carbon_gco2 for cell in cells)
    return (
        float(np.mean(np.abs(energy_j - booked_j) <= found.energy_j)),
        float(np.mean(np.abs(carbon - booked) <= found.carbon_gco2)),
    )


def of_nodes(line: Line, at: int) -> str:
    return f"n{line.node}"


def of_lines(line: Line, at: int) -> str:
    """What is wrong: as if a meter were off by another share in each line."""
    return f"n{line.node}-{at}"


PARTS: dict[str, Callable[[Line], bool]] = {
    "a job on one node": lambda line: line.job == 3,
    "a job on three nodes": lambda line: line.job == 8,
    "a project": lambda line: line.job % 4 == 1,
    "the total": lambda line: True,
}


@pytest.mark.parametrize("modelled", [0.0, 0.15], ids=["all metered", "partly modelled"])
@pytest.mark.parametrize("part", PARTS)
def test_the_truth_is_within_the_interval_9_times_out_of_10(part: str, modelled: float) -> None:
    lines = [line for line in a_ledger(modelled) if PARTS[part](line)]
    assert len(lines) >= 14
    for covered in coverage(lines, of_nodes):
        assert 0.87 <= covered <= 0.93


@pytest.mark.parametrize("part", PARTS)
def test_without_the_correlation_within_a_node_it_is_not(part: str) -> None:
    lines = [line for line in a_ledger(0.0) if PARTS[part](line)]
    assert coverage(lines, of_lines)[0] < 0.7


def test_half_widths_of_a_total_are_less_than_the_sum_of_its_parts() -> None:
    cells = [Cell("a", "DE", 100.0, 0.0, 10.0, 0.0), Cell("b", "FR", 100.0, 0.0, 10.0, 0.0)]
    assert half_widths(cells).energy_j == pytest.approx(5 * 2**0.5)
    assert half_widths(cells).carbon_gco2 == pytest.approx((2 * 0.5**2 + 2 * 1.5**2) ** 0.5)
    assert half_widths([]) == (0.0, 0.0)


def test_what_is_taken_from_a_job_again_leaves_no_width() -> None:
    line = Cell("a", "DE", 100.0, 40.0, 10.0, 4.0)
    back = Cell("a", "DE", -100.0, -40.0, -10.0, -4.0)
    assert half_widths([line, back]) == (0.0, 0.0)
