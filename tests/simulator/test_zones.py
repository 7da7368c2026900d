"""Simulations of nodes in several zones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.contracts.simulations import TrainingOptions
from services.core.domain.errors import DomainError
from services.core.domain.gpus import gpu_model
from services.core.domain.transfers import Transfer
from services.simulator.engine import EngineOptions, SimulationResult, simulate
from services.simulator.training import Inputs, OptionError, prepare
from services.simulator.workload import CarbonTrace, ClusterSpec, Workload
from tests.support.workloads import a_profile, a_trace, a_workload

JOULES = 3.6e6
FREE = Transfer(checkpoint_gb=0.0, gbps=1.0, kwh_per_gb=0.0)


def grid(zone: str, *hourly: float) -> CarbonTrace:
    return replace(a_trace([*hourly, *[hourly[-1]] * 47]), zone=zone)


def run(
    workload: Workload, *grids: CarbonTrace, policy: str = "fifo", nodes: str = "1x2:RTX3090", **options: object
) -> SimulationResult:
    """Run jobs on these nodes in each zone."""
    cluster = ClusterSpec.parse(",".join(f"{each.zone}={nodes}" for each in grids))
    engine = EngineOptions(**{"host_idle_w": 0.0, **options})  # type: ignore[arg-type]
    return simulate(policy, workload, cluster, grids[0], options=engine, elsewhere=grids[1:])


def test_each_zone_is_charged_at_its_own_intensity_and_all_adds_up() -> None:
    """Three jobs of an hour at 250 W: two fill the cleaner zone, the third goes to the other."""
    jobs = a_workload([(0.0, 3_600.0, 1)] * 3)

    result = run(jobs, grid("AA", 400.0), grid("BB", 100.0))

    idle_kwh = gpu_model("RTX3090").idle_w / 1_000.0
    assert {zone: of["energy_kwh"] for zone, of in result.zones.items()} == pytest.approx(
        {"AA": 0.25 + idle_kwh, "BB": 0.5}
    )
    assert result.carbon_kg == pytest.approx(((0.25 + idle_kwh) * 400.0 + 0.5 * 100.0) / 1_000.0)
    assert sum(of["carbon_kg"] for of in result.zones.values()) == pytest.approx(result.carbon_kg)
    assert float(result.columns.carbon_gco2.sum()) + 1_000 * result.idle_carbon_kg == pytest.approx(
        1_000 * result.carbon_kg
    )
    assert result.zone == "AA,BB"


def test_data_stay_where_a_job_says() -> None:
    jobs = replace(a_workload([(0.0, 3_600.0, 1)] * 2), zone=("AA", ""))

    zones = run(jobs, grid("AA", 400.0), grid("BB", 100.0)).zones

    assert zones["AA"]["energy_kwh"] == zones["BB"]["energy_kwh"] > 0.25


def test_a_move_takes_the_time_and_the_energy_of_its_checkpoint() -> None:
    """Two hours of work; the zone that is cleaner at first becomes the dirtier one after an hour."""
    jobs = a_workload([(0.0, 7_200.0, 1)])
    grids = grid("AA", 100.0, 600.0), grid("BB", 900.0, 50.0)
    transfer = Transfer(checkpoint_gb=45.0, gbps=1.0, kwh_per_gb=1e-3)  # 6 minutes, 45 Wh

    moved = run(jobs, *grids, policy="joint", transfer=transfer)
    dear = run(jobs, *grids, policy="joint", transfer=replace(transfer, kwh_per_gb=1.0))

    assert [of["checkpoints"] for of in moved.zones.values()] == [0, 1]
    assert [of["checkpoints"] for of in dear.zones.values()] == [0, 0]
    assert moved.avg_jct_s == pytest.approx(7_200.0 + 360.0, abs=200.0), "it was stopped by a round, with a boot"
    used_kwh = sum(of["energy_kwh"] for of in moved.zones.values())
    assert moved.energy_kwh == pytest.approx(used_kwh + 0.045)
    assert moved.carbon_kg < dear.carbon_kg


def test_one_zone_that_holds_all_holds_all() -> None:
    """With moves for nothing, three zones emit what the cleanest alone does."""
    jobs = a_workload([(600.0 * at, 5_000.0, 1) for at in range(12)], [a_profile(restart_s=0.0, checkpoint_s=0.0)])
    grids = grid("AA", 400.0), grid("BB", 100.0), grid("CC", 300.0)
    asleep = {"nodes": "16x2:RTX3090", "policy": "fifo", "power_down_after_s": 1e-3}

    alone = run(jobs, grids[1], **asleep)  # type: ignore[arg-type]
    among = run(jobs, *grids, **asleep, transfer=FREE)  # type: ignore[arg-type]

    assert among.carbon_kg == pytest.approx(alone.carbon_kg)
    assert among.avg_jct_s == alone.avg_jct_s


def options(**given: object) -> TrainingOptions:
    return TrainingOptions(policy="fifo", **{"start": "2023-08-08", "days": 0.1, **given})  # type: ignore[arg-type]


def test_prices_are_those_of_a_cluster_in_one_zone(tmp_path: Path) -> None:
    (prices := tmp_path / "prices.toml").write_text(
        'currency = "EUR"\n[zones.GB]\nper_kwh = 0.1\n[zones.SE]\nper_kwh = 0.2\n'
    )
    inputs = Inputs("green-day", "GB", "perfect", prices=prices)

    assert prepare(options(cluster="2x2:RTX3090"), inputs).trace.prices is not None
    with pytest.raises(OptionError, match="one zone"):
        prepare(options(cluster="SE=2x2:RTX3090,1x2:RTX3090"), inputs)


def test_clusters_name_zones_whose_grids_are_known() -> None:
    inputs = Inputs("green-day", "GB", "perfect")

    run = prepare(options(cluster="SE=2x2:RTX3090,1x2:RTX3090"), inputs)

    assert run.trace.zone == "GB"
    assert [each.zone for each in run.elsewhere] == ["SE"]
    for said, refused in (
        ("no grid of zone MARS is bundled", options(cluster="MARS=2x2:RTX3090")),
        ("one zone", options(cluster="SE=2x2:RTX3090", levers=True)),
        ("slices", options(cluster="SE=1x4:A100[3g,2g,2g],GB=1x4:A100")),
    ):
        with pytest.raises(OptionError, match=said):
            prepare(refused, inputs)
    with pytest.raises(DomainError, match="no grid of zone SE"):
        simulate("fifo", a_workload([(0.0, 60.0, 1)]), ClusterSpec.parse("SE=1x1:A100"), grid("GB", 1.0))
