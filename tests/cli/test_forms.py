"""`wattshift report --as FORM`: each form against its published schema or table, and what is unknown stays unknown."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from typer.testing import CliRunner

from services.cli.commands import CliError
from services.cli.main import app
from services.cli.reports import forms
from services.cli.reports.factors import CATALOGUE, read_facts
from services.cli.reports.forms import Facts

KWH_J = 3.6e6
NOW = datetime(2026, 12, 1, tzinfo=UTC)
SCHEMAS = json.loads(Path(__file__).with_name("boamps-schemas.json").read_text())


def a_footprint(kwh: float = 10.0, carbon: float = 3_000.0, gpu_s: float = 7_200.0) -> dict[str, float]:
    return {
        **{"energy_j": kwh * KWH_J, "gpu_energy_j": kwh * KWH_J, "carbon_gco2": carbon, "gpu_s": gpu_s},
        "estimated_energy_j": KWH_J,
    }


def a_report(pue: float = 1.2, embodied: float | None = None) -> dict[str, Any]:
    return {
        **{"start_at": "2026-11-01T00:00:00Z", "end_at": "2026-12-01T00:00:00Z"},
        "lines": [{"group": "A100-SXM4-40GB", "footprint": a_footprint(8, 2_400), "jobs": 2}],
        "idle": a_footprint(2, 600, 0),
        "total": a_footprint(),
        "total_accounts": {"facility_energy_j": 10 * KWH_J * pue, "embodied_gco2": embodied},
        "units": [{"unit": "1000 tokens", "amount": 500.0}],
    }


def stated(value: float) -> dict[str, Any]:
    return {"value": value, "source": "a meter"}


def a_line(hour: int, minutes: float = 0, *, kwh: float = 1.0, zone: str = "DE", **more: Any) -> dict[str, Any]:
    at = datetime(2026, 11, 1, tzinfo=UTC) + timedelta(hours=hour, minutes=minutes)
    return {
        **{"start_at": at.isoformat(), "end_at": (at + timedelta(minutes=10)).isoformat(), "zone": zone, "batch": 1},
        **{"facility_energy_j": kwh * KWH_J, "carbon_gco2": 300 * kwh, "node_id": "n0", **more},
    }


def a_certificate(first: int, last: int, kwh: float, *zones: str, **more: Any) -> dict[str, Any]:
    start, end = (datetime(2026, 11, 1, tzinfo=UTC) + timedelta(hours=hour) for hour in (first, last))
    ends = {"start": start.isoformat(), "end": end.isoformat()}
    return {"zones": list(zones or ("DE",)), **ends, "kwh": kwh, "source": "a registry", **more}


def test_eed_has_the_indicators_of_the_regulation() -> None:
    facts = Facts.model_validate(
        {
            **{"water_m3": stated(4), "potable_water_m3": stated(1), "reused_heat_kwh": stated(3)},
            **{"renewable_guarantees_kwh": stated(2), "renewable_agreements_kwh": stated(3)},
            "renewable_onsite_kwh": stated(1),
        }
    )
    found = forms.eed(a_report(), facts)
    assert (found["E_IT_kWh"], found["E_DC_kWh"], found["PUE"]) == pytest.approx((10, 12, 1.2))
    assert (found["WUE_m3_per_kWh"], found["ERF"], found["REF"]) == pytest.approx((0.4, 0.25, 0.5))
    assert found["E_RES-TOT_kWh"] == 6
    assert found["unknown"] == {}
    assert found["sources"]["W_IN"] == {"value": 4, "source": "a meter", "estimated": False}


def test_eed_without_facts_has_no_default() -> None:
    found = forms.eed(a_report(pue=1.0), Facts())
    for name in ("E_DC_kWh", "PUE", "WUE_m3_per_kWh", "ERF", "REF", "E_RES-TOT_kWh", "W_IN_m3"):
        assert found[name] is None
    assert {"PUE", "W_IN", "E_REUSE", "E_RES-GOO"} <= set(found["unknown"])
    one = Facts.model_validate({"renewable_onsite_kwh": stated(1)})
    assert forms.eed(a_report(), one)["REF"] is None, "a sum of which a part is unknown is unknown"


def a_job(model: str | None, state: str, hours: float | None, kwh: float = 5) -> dict[str, Any]:
    return {
        **{"spec": {"labels": {"model": model} if model else {}}, "state": state, "footprint": a_footprint(kwh)},
        "started_at": "2026-11-01T00:00:00Z",
        "ended_at": None if hours is None else f"2026-11-01T{int(hours):02}:00:00Z",
    }


def test_annex_xi_counts_every_run_that_led_to_a_model() -> None:
    jobs = [a_job("m", "succeeded", 3), a_job("m", "failed", 2), a_job("m", "running", None), a_job(None, "failed", 9)]
    found = forms.annex_xi(a_report(), jobs, Facts.model_validate({"training_flop": {"m": stated(1e21)}}))
    (model,) = found["models"]
    assert (model["model"], model["runs"], model["runs_not_ended"]) == ("m", 3, 1)
    assert (model["energy_kwh"], model["training_hours"], model["hardware_hours"]) == (15, 5, 6)
    assert (model["training_flop"], model["energy_estimated_kwh"]) == (1e21, 3)
    without = forms.annex_xi(a_report(), jobs, Facts())
    assert without["models"][0]["training_flop"] is None
    assert "FLOP of m" in without["unknown"]


def validator() -> Any:
    return jsonschema_rs.Draft4Validator(
        SCHEMAS["https://raw.githubusercontent.com/Boavizta/BoAmps/main/model/report_schema.json"],
        retriever=lambda uri: SCHEMAS[uri],
    )


@pytest.mark.parametrize("named", [False, True])
def test_boamps_is_valid_by_its_schema(named: bool) -> None:
    task = {"taskStage": "training", "taskFamily": "text generation"} if named else {}
    facts = Facts.model_validate(
        {"task": task, **({"country": "Germany", "infrastructure_type": "onPremise"} if named else {})}
    )
    nodes = [{"devices": [{"model": "H100"}, {"model": "H100"}, {"model": "H100 1g", "parent": 0}]}] if named else []
    found = forms.boamps(a_report(), nodes, facts, NOW)
    assert [error.message for error in validator().iter_errors(found)] == []
    assert found["measures"][0]["powerConsumption"] == 10
    if named:
        assert found["infrastructure"]["components"] == [
            {"componentName": "H100", "componentType": "gpu", "nbComponent": 2}
        ]
        assert found["environment"]["powerSourceCarbonIntensity"] == pytest.approx(250)
    for path in (("task",), ("measures", 0, "powerConsumption"), ("infrastructure", "infraType")):
        broken = copy.deepcopy(found)
        place: Any = broken
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]
        assert not validator().is_valid(broken)


def test_certificates_cover_their_hours_and_zones_until_they_run_out() -> None:
    lines = [a_line(0), a_line(1), a_line(2), a_line(0, zone="FR"), a_line(9)]
    facts = Facts.model_validate(
        {
            "certificates": [a_certificate(0, 24, 1.0), a_certificate(0, 2, 0.5, gco2_per_kwh=20)],
            "residual_gco2_per_kwh": {"DE": stated(700), "FR": stated(50)},
        }
    )
    found = forms.ghg_hourly(a_report(), lines, facts)
    rows = {(row["hour"][11:13], row["zone"]): row for row in found["hours"]}
    assert [(hour, zone, row["certificates_kwh"]) for (hour, zone), row in rows.items()] == [
        *(("00", "DE", 1.0), ("00", "FR", 0.0), ("01", "DE", 0.5), ("02", "DE", 0.0), ("09", "DE", 0.0))
    ]
    assert rows["00", "DE"]["market_based_gco2"] == pytest.approx(0.5 * 20)
    assert rows["01", "DE"]["market_based_gco2"] == pytest.approx(0.5 * 700)
    assert rows["00", "FR"]["market_based_gco2"] == pytest.approx(50)
    assert found["market_based_gco2"] == pytest.approx(10 + 350 + 700 + 50 + 700)
    assert found["location_based_gco2"] == pytest.approx(1_500)
    assert (found["matched_share"], found["certificates_left_kwh"]) == pytest.approx((0.3, 0))


def test_without_a_residual_mix_the_rest_is_unknown_and_so_is_the_sum() -> None:
    found = forms.ghg_hourly(a_report(), [a_line(0), a_line(1, zone="FR")], Facts())
    assert found["market_based_gco2"] is None
    assert set(found["unknown"]) == {"residual mix of DE", "residual mix of FR"}
    covered = Facts.model_validate({"certificates": [a_certificate(0, 5, 9, "DE", "FR")]})
    assert forms.ghg_hourly(a_report(), [a_line(0), a_line(1, zone="FR")], covered)["market_based_gco2"] == 0


def test_lines_are_divided_among_hours_and_sums_have_none() -> None:
    hours, without = forms.hours_of([a_line(0, 55), a_line(3, batch=None, kwh=7), a_line(2, kwh=-1), a_line(2)])
    assert {key[0].hour: amounts for key, amounts in hours.items()} == {
        0: pytest.approx([0.5, 150]),
        1: pytest.approx([0.5, 150]),
        2: [0, 0],
    }
    assert without == 7
    found = forms.ghg_hourly(a_report(), [a_line(3, batch=None)], Facts())
    assert found["market_based_gco2"] is None
    assert "hours of daily sums" in found["unknown"]


REQUESTS = {
    "servers": {"energy_j": 5 * KWH_J, "carbon_gco2": 1_500.0},
    "lines": [{"input_tokens": 1_500_000, "output_tokens": 500_000}],
}


def test_sci_ai_scores_consumers_and_providers_over_their_boundaries() -> None:
    stated_of_m = {"training_flop": {"m": stated(2e15)}, "parameters_billion": {"m": stated(2)}}
    facts = Facts.model_validate({"storage_kwh": stated(1), **stated_of_m})
    control = [a_line(0, node_id=forms.CONTROL_PLANE), a_line(1)]
    found = forms.sci_ai(a_report(embodied=100.0), REQUESTS, control, facts)
    consumer, provider = found["consumer"], found["provider"]
    assert consumer["boundary"] == {
        **{"inference_gco2": 1_500, "gateway_router_orchestration_gco2": 300, "storage_gco2": pytest.approx(250)},
        "embodied_gco2": pytest.approx(50),
    }
    assert consumer["sci_gco2e_per_million_tokens"] == pytest.approx(2_100 / 2)
    assert provider["boundary"] == {"training_gco2": 900, "embodied_gco2": pytest.approx(50)}
    assert provider["sci_gco2e_per_1e15_flop"] == pytest.approx(475)
    assert provider["sci_gco2e_per_1000_training_tokens"] == pytest.approx(950 / 500)
    assert provider["sci_gco2e_per_billion_parameters"] == pytest.approx(475)
    assert {name: each["value"] for name, each in found["sources"].items()} == {
        **{"storage": 1, "FLOP of m": 2e15, "parameters of m": 2}
    }
    assert found["unknown"] == {}


def test_sci_ai_has_no_score_without_its_whole_boundary() -> None:
    found = forms.sci_ai(a_report(embodied=100.0), REQUESTS, [a_line(0)], Facts())
    assert found["consumer"]["sci_gco2e_per_million_tokens"] is None
    assert set(found["unknown"]) == {"control plane", "storage"}
    without = forms.sci_ai(a_report(), REQUESTS, [], Facts())
    assert "embodied emissions of A100-SXM4-40GB" in without["unknown"]
    estimate = Facts.model_validate({"embodied_kgco2": CATALOGUE["embodied_kgco2"]})
    with_estimate = forms.sci_ai(a_report(), REQUESTS, [], estimate)
    assert with_estimate["sources"]["embodied emissions of A100-SXM4-40GB"]["estimated"] is True


def test_the_catalogue_is_of_facts_that_have_sources() -> None:
    facts = Facts.model_validate({kind: values for kind, values in CATALOGUE.items() if kind != "unknown"})
    factors = [factor for kind in facts.model_fields_set for factor in getattr(facts, kind).values()]
    assert factors
    assert all(factor.estimated and len(factor.source) > 20 for factor in factors)
    assert set(CATALOGUE["unknown"]) <= set(Facts.model_fields)


def test_factors_are_added_to_a_file_and_what_it_has_stays(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    own = {"embodied_kgco2": {"A100-SXM4-40GB": stated(150)}, "water_m3": stated(3)}
    file.write_text(json.dumps(own))
    done = CliRunner().invoke(app, ["factors", "add", str(file), "--from", "catalogue"])
    assert done.exit_code == 0, done.output
    facts = read_facts(file)
    assert facts.embodied_kgco2["A100-SXM4-40GB"].value == 150
    assert facts.water_m3 is not None
    fresh = tmp_path / "new.json"
    assert CliRunner().invoke(app, ["factors", "add", str(fresh)]).exit_code == 0
    assert read_facts(fresh).embodied_kgco2["A100-SXM4-40GB"].estimated
    assert "A100-SXM4-40GB" in CliRunner().invoke(app, ["factors"]).output.replace("\n", "")


def test_a_file_that_is_no_facts_gets_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    for text, named in (
        ('{"watr_m3": 1}', "watr_m3"),
        ('{"pue": {"value": -1, "source": "x"}}', "pue.value"),
        ("{", ""),
    ):
        file.write_text(text)
        with pytest.raises(CliError, match=f"facts.json: {named}"):
            read_facts(file)
