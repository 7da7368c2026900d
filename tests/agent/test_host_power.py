"""CPU energy: RAPL counters that wrap, and the model for hosts without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_agent import host_power as module
from gpu_agent.host_power import ModelledPower, RaplPower, host_power
from services.contracts.nodes import EnergySource
from services.core.accounting.host_power import CpuPowerModel

MODEL = CpuPowerModel((0.0, 0.5, 1.0), (60.0, 160.0, 240.0))
RANGE_UJ = 262_143_328_850


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The host's busy CPU seconds, of four CPUs."""
    now = {"busy_s": 1_000.0}
    monkeypatch.setattr(module, "_busy_cpu_s", lambda: now["busy_s"])
    monkeypatch.setattr(module.psutil, "cpu_count", lambda: 4)
    return now


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    """Two packages with a DRAM zone, as the kernel shows them."""
    for zone, name in (("intel-rapl:0", "package-0"), ("intel-rapl:1", "package-1"), ("intel-rapl:2", "psys")):
        _zone(tmp_path / zone, name)
    _zone(tmp_path / "intel-rapl:0" / "intel-rapl:0:0", "dram")
    return tmp_path


def _zone(path: Path, name: str) -> None:
    path.mkdir(parents=True)
    (path / "name").write_text(name + "\n")
    (path / "energy_uj").write_text("1000000\n")
    (path / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")


def test_the_model_follows_utilisation(busy: dict[str, float]) -> None:
    power = ModelledPower(MODEL, ranks_only=False)
    busy["busy_s"] += 20  # of 40
    energy = power.advance(10, 5)
    assert energy.total_j == pytest.approx(1_600)
    assert energy.j_per_cpu_s * 20 == pytest.approx(1_000), "what activity adds to the idle 60 W"
    busy["busy_s"] += 0
    assert power.advance(10, 0).total_j == pytest.approx(600)
    assert power.advance(10, 0).j_per_cpu_s == 0


def test_a_simulated_node_counts_its_own_ranks_alone(busy: dict[str, float]) -> None:
    power = ModelledPower(MODEL, ranks_only=True)
    busy["busy_s"] += 40
    assert power.advance(10, 0).total_j == pytest.approx(600)
    energy = power.advance(10, 10)
    assert energy.total_j == pytest.approx(1_100)
    assert energy.j_per_cpu_s * 10 == pytest.approx(500)


def test_packages_are_added_up_and_a_counter_may_wrap(busy: dict[str, float], powercap: Path) -> None:
    power = RaplPower(MODEL, powercap)
    (powercap / "intel-rapl:0" / "energy_uj").write_text("501000000")
    (powercap / "intel-rapl:1" / "energy_uj").write_text("301000000")
    assert power.advance(10, 0).total_j == pytest.approx(800)
    nearly = RANGE_UJ - 100_000_000
    (powercap / "intel-rapl:1" / "energy_uj").write_text(str(nearly))
    power = RaplPower(MODEL, powercap)
    (powercap / "intel-rapl:1" / "energy_uj").write_text("1000000")
    assert power.advance(10, 0).total_j == pytest.approx(101)


def test_counters_are_taken_up_again(busy: dict[str, float], powercap: Path) -> None:
    state = RaplPower(MODEL, powercap).state()
    (powercap / "intel-rapl:0" / "energy_uj").write_text("91000000")
    busy["busy_s"] += 3
    again = RaplPower(MODEL, powercap)
    again.restore(state)
    energy = again.advance(10, 1)
    assert energy.total_j == pytest.approx(90)
    assert 0 < energy.j_per_cpu_s * 3 < 90


@pytest.mark.parametrize("damage", [{"busy_s": "long"}, {"counters_uj": {"intel-rapl:0": 0, "intel-rapl:1": "odd"}}])
def test_counters_that_cannot_be_read_are_left_alone(
    busy: dict[str, float], powercap: Path, damage: dict[str, Any]
) -> None:
    power = RaplPower(MODEL, powercap)
    state = power.state()
    earlier = {"counters_uj": {"intel-rapl:0": 0, "intel-rapl:1": 0}, "busy_s": 0.0}
    with pytest.raises(ValueError, match=r"odd|long"):
        power.restore(earlier | damage)
    assert power.state() == state


def test_a_counter_that_becomes_unreadable_adds_nothing(busy: dict[str, float], powercap: Path) -> None:
    power = RaplPower(MODEL, powercap)
    (powercap / "intel-rapl:0" / "energy_uj").unlink()
    assert power.advance(10, 0).total_j == 0


def test_the_best_source_there_is(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POWERCAP", powercap / "none")
    monkeypatch.setattr(RaplPower.__init__, "__defaults__", (powercap / "none",))
    assert host_power("auto", MODEL, simulated=False).source is EnergySource.MODELLED
    with pytest.raises(OSError, match="no CPU package"):
        host_power("rapl", MODEL, simulated=False)
    monkeypatch.setattr(RaplPower.__init__, "__defaults__", (powercap,))
    assert host_power("auto", MODEL, simulated=False).source is EnergySource.COUNTER
    assert host_power("auto", MODEL, simulated=True).source is EnergySource.MODELLED
    assert host_power("modelled", MODEL, simulated=False).source is EnergySource.MODELLED
