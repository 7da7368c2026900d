"""`wattshift report --as FORM`: what the ledger has, in the forms that standards and laws ask for.

What the ledger cannot know, an operator states in a file of facts. A figure whose input is missing is null, and
``unknown`` says where to get that input: there are no defaults. docs/forms.md says which document each form follows.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.contracts.schema import Instant
from services.core.domain.units import J_PER_KWH

FORMS = ("sci-ai", "boamps", "annex-xi", "eed", "ghg-hourly")
CONTROL_PLANE = "control-plane"
HOUR = timedelta(hours=1)
Figures = dict[str, Any]


class _Stated(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Factor(_Stated):
    """A value, where it comes from, and whether it is an estimate for the site."""

    value: float = Field(ge=0, allow_inf_nan=False)
    source: str = Field(min_length=1)
    estimated: bool = False


class Certificate(_Stated):
    """Energy attribute certificates: for which hours, and where the energy can be delivered."""

    zones: list[str] = Field(min_length=1)
    start: Instant
    end: Instant
    kwh: float = Field(gt=0, allow_inf_nan=False)
    gco2_per_kwh: float = Field(default=0, ge=0, allow_inf_nan=False)
    source: str = Field(min_length=1)


class Facts(_Stated):
    """What an operator states for reports, all of it about the reported period."""

    residual_gco2_per_kwh: dict[str, Factor] = {}
    certificates: list[Certificate] = []
    embodied_kgco2: dict[str, Factor] = {}
    device_lifetime_s: float = Field(default=4 * 365 * 86_400.0, gt=0)
    storage_kwh: Factor | None = None
    pue: Factor | None = None
    water_m3: Factor | None = None
    potable_water_m3: Factor | None = None
    reused_heat_kwh: Factor | None = None
    renewable_guarantees_kwh: Factor | None = None
    renewable_agreements_kwh: Factor | None = None
    renewable_onsite_kwh: Factor | None = None
    training_flop: dict[str, Factor] = {}
    parameters_billion: dict[str, Factor] = {}
    task: dict[str, Any] = {}
    infrastructure_type: str | None = None
    country: str | None = None


@dataclass
class Inputs:
    """What the facts have, and what they lack."""

    facts: Facts
    unknown: dict[str, str] = field(default_factory=dict[str, str])
    sources: dict[str, Figures] = field(default_factory=dict[str, Figures])

    def take(self, name: str, factor: Factor | None, where: str) -> float | None:
        """Return a stated value and note its source, or None and note where to get it."""
        if factor is None:
            self.unknown[name] = where
            return None
        self.sources[name] = factor.model_dump()
        return factor.value

    def framed(self, form: str, follows: str, found: Mapping[str, Any], report: Mapping[str, Any]) -> Figures:
        """Return a form with its period, what it follows, its sources and what is unknown."""
        period = {"start": report["start_at"], "end": report["end_at"]}
        return {"form": form, "follows": follows, **period, **found, "sources": self.sources, "unknown": self.unknown}


def _kwh(joules: float) -> float:
    return joules / J_PER_KWH


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def eed(report: Mapping[str, Any], facts: Facts) -> Figures:
    """Return the indicators of Delegated Regulation (EU) 2024/1364, Annexes II and III, by their symbols.

    ``E_IT`` is the energy of the nodes in the ledger, and ``E_DC`` that times PUE: other equipment of the data centre
    is not in it.
    """
    inputs = Inputs(facts)
    e_it = _kwh(report["total"]["energy_j"])
    e_dc = _kwh(report["total_accounts"]["facility_energy_j"])
    if facts.pue is not None:
        e_dc = e_it * (inputs.take("PUE", facts.pue, "") or 1.0)
    elif e_dc == e_it:
        inputs.unknown["PUE"] = "a meter at the utility's handover; TELEMETRY_PUE, or `pue` in the facts"
    where = "the operator's meters: `{}` in the facts"
    water, potable, heat, guarantees, agreements, onsite = (
        inputs.take(symbol, getattr(facts, name), where.format(name))
        for symbol, name in (
            ("W_IN", "water_m3"),
            ("W_IN-POT", "potable_water_m3"),
            ("E_REUSE", "reused_heat_kwh"),
            ("E_RES-GOO", "renewable_guarantees_kwh"),
            ("E_RES-PPA", "renewable_agreements_kwh"),
            ("E_RES-OS", "renewable_onsite_kwh"),
        )
    )
    renewables = None
    if guarantees is not None and agreements is not None and onsite is not None:
        renewables = guarantees + agreements + onsite
    pue = None if "PUE" in inputs.unknown else _ratio(e_dc, e_it)
    whole = None if "PUE" in inputs.unknown else e_dc
    found = {
        **{"E_IT_kWh": e_it, "E_DC_kWh": whole, "W_IN_m3": water, "W_IN-POT_m3": potable, "E_REUSE_kWh": heat},
        **{"E_RES-TOT_kWh": renewables, "E_RES-GOO_kWh": guarantees, "E_RES-PPA_kWh": agreements},
        **{"E_RES-OS_kWh": onsite, "PUE": pue, "WUE_m3_per_kWh": _ratio(water, e_it), "ERF": _ratio(heat, whole)},
        "REF": _ratio(renewables, whole),
    }
    return inputs.framed("eed", "Delegated Regulation (EU) 2024/1364, Annexes II and III", found, report)


def annex_xi(report: Mapping[str, Any], jobs: Iterable[Mapping[str, Any]], facts: Facts) -> Figures:
    """Return what Annex XI, section 1, point 2 (d) and (e) of Regulation (EU) 2024/1689 asks for, by model.

    The runs that led to a model are all jobs with its name as their label ``model``, however they ended; failed and
    cancelled ones count.
    """
    inputs, runs = Inputs(facts), defaultdict[str, list[Mapping[str, Any]]](list)
    for job in jobs:
        if name := job["spec"].get("labels", {}).get("model"):
            runs[name].append(job)
    models: list[Figures] = []
    for name, found in sorted(runs.items()):
        flop = inputs.take(
            f"FLOP of {name}", facts.training_flop.get(name), "the training program's count: `training_flop`"
        )
        times = [(job["started_at"], job["ended_at"]) for job in found if job.get("started_at")]
        spans = [(datetime.fromisoformat(a), datetime.fromisoformat(b)) for a, b in times if b]
        energy_j = sum(job["footprint"]["energy_j"] for job in found)
        models.append(
            {
                **{"model": name, "runs": len(found), "energy_kwh": _kwh(energy_j)},
                "energy_estimated_kwh": _kwh(sum(job["footprint"]["estimated_energy_j"] for job in found)),
                "hardware_hours": sum(job["footprint"]["gpu_s"] for job in found) / 3_600,
                "training_hours": sum((b - a).total_seconds() for a, b in spans) / 3_600,
                **{"runs_not_ended": len(times) - len(spans), "training_flop": flop},
                "carbon_kgco2": sum(job["footprint"]["carbon_gco2"] for job in found) / 1_000,
            }
        )
    if not models:
        inputs.unknown["models"] = "jobs with a label `model`: `wattshift submit --label model=NAME`"
    follows = "Regulation (EU) 2024/1689, Annex XI, section 1, point 2 (d) and (e)"
    return inputs.framed("annex-xi", follows, {"models": models}, report)


def boamps(report: Mapping[str, Any], nodes: Iterable[Mapping[str, Any]], facts: Facts, now: datetime) -> Figures:
    """Return a report in the JSON schema of BoAmps (Boavizta), of all jobs of the period.

    Its schema has no room for unknown values: a required value that ``task`` does not state is the word ``unknown``.
    """
    boards: dict[str, int] = defaultdict(int)
    for node in nodes:
        for device in node["devices"]:
            if device.get("parent") is None:
                boards[device["model"]] += 1
    total, task = report["total"], facts.task
    start, end = (datetime.fromisoformat(at) if at else None for at in (report["start_at"], report["end_at"]))
    measured = {"measurementMethod": "wattshift", "powerConsumption": _kwh(total["energy_j"])}
    if start is not None:
        measured["measurementDateTime"] = f"{start.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
        measured["measurementDuration"] = ((end or now) - start).total_seconds()
    components = [{"componentName": m, "componentType": "gpu", "nbComponent": n} for m, n in sorted(boards.items())]
    made: Figures = {
        "header": {"reportDatetime": f"{now.astimezone(UTC):%Y-%m-%d %H:%M:%S}", "formatVersion": "0.1"},
        "task": {
            **{"taskStage": "unknown", "taskFamily": "unknown", "algorithms": [{"algorithmName": "unknown"}]},
            **{"dataset": [{"dataUsage": "input", "dataType": "other"}], **task},
        },
        "measures": [measured],
        "infrastructure": {
            "infraType": facts.infrastructure_type or "other",
            "components": components or [{"componentType": "gpu", "nbComponent": 0}],
        },
    }
    if facts.country:
        kwh = _kwh(report["total_accounts"]["facility_energy_j"])
        made["environment"] = {"country": facts.country}
        if kwh:
            made["environment"]["powerSourceCarbonIntensity"] = total["carbon_gco2"] / kwh
    return made


def hours_of(lines: Iterable[Mapping[str, Any]]) -> tuple[dict[tuple[datetime, str], list[float]], float]:
    """Return energy with PUE in kWh and gCO2 by hour and zone, and the kWh of daily sums, which have no hour.

    A line that spans more than one hour is divided by time.
    """
    hours: dict[tuple[datetime, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    without = 0.0
    for line in lines:
        kwh, carbon = _kwh(line["facility_energy_j"]), line["carbon_gco2"]
        if line["batch"] is None:
            without += kwh
            continue
        at, end = (datetime.fromisoformat(line[name]).astimezone(UTC) for name in ("start_at", "end_at"))
        length_s = (end - at).total_seconds()
        while True:
            hour = at.replace(minute=0, second=0, microsecond=0)
            part_end = min(end, hour + HOUR)
            share = (part_end - at).total_seconds() / length_s if length_s > 0 else 1.0
            amounts = hours[hour, line["zone"]]
            amounts[0] += kwh * share
            amounts[1] += carbon * share
            if (at := part_end) >= end:
                break
    return hours, without


def ghg_hourly(report: Mapping[str, Any], lines: Iterable[Mapping[str, Any]], facts: Facts) -> Figures:
    """Return scope 2 hour by hour, by location and by market.

    A certificate covers energy of its hours in the zones where it can be delivered until it has run out; those that
    end first are used first. The residual mix prices the rest.
    """
    inputs = Inputs(facts)
    hours, without_kwh = hours_of(lines)
    left = {number: each.kwh for number, each in enumerate(facts.certificates)}
    order = sorted(left, key=lambda number: (facts.certificates[number].end, number))
    rows: list[Figures] = []
    for (hour, zone), (kwh, carbon) in sorted(hours.items()):
        rest, market = max(0.0, kwh), 0.0
        for number in order:
            each = facts.certificates[number]
            if zone in each.zones and each.start <= hour and hour + HOUR <= each.end:
                used = min(rest, left[number])
                rest, left[number], market = rest - used, left[number] - used, market + used * each.gco2_per_kwh
        covered = max(0.0, kwh) - rest
        if rest > 0:
            where = "AIB (Europe), Green-e (US) or the supplier: `residual_gco2_per_kwh`"
            residual = inputs.take(f"residual mix of {zone}", facts.residual_gco2_per_kwh.get(zone), where)
            market = None if residual is None else market + rest * residual
        rows.append(
            {
                **{"hour": hour.isoformat(), "zone": zone, "kwh": kwh, "location_based_gco2": carbon},
                **{"certificates_kwh": covered, "residual_kwh": rest, "market_based_gco2": market},
            }
        )
    known = [row["market_based_gco2"] for row in rows]
    kwh = sum(row["kwh"] for row in rows)
    found = {
        **{"kwh": kwh, "location_based_gco2": sum(row["location_based_gco2"] for row in rows)},
        "market_based_gco2": None if None in known or without_kwh else sum(known),
        "matched_share": _ratio(sum(row["certificates_kwh"] for row in rows), kwh),
        **{"certificates_left_kwh": sum(left.values()), "kwh_without_an_hour": without_kwh, "hours": rows},
    }
    if without_kwh:
        inputs.unknown["hours of daily sums"] = "keep lines for longer: TELEMETRY_RETENTION_S"
    return inputs.framed("ghg-hourly", "GHG Protocol Scope 2 Guidance, hourly matching", found, report)


def sci_ai(
    report: Mapping[str, Any], requests: Mapping[str, Any], lines: Iterable[Mapping[str, Any]], facts: Facts
) -> Figures:
    """Return the consumer and the provider score of SCI for AI (Green Software Foundation).

    Args:
        report: The report by GPU model.
        requests: The requests by the model asked for.
        lines: The period's lines: what model servers and the control plane used.
        facts: What the operator states.
    """
    inputs = Inputs(facts)
    servers = requests["servers"] or {"carbon_gco2": 0.0, "energy_j": 0.0}
    control = [line for line in lines if line["node_id"] == CONTROL_PLANE]
    control_g = sum(line["carbon_gco2"] for line in control) if control else None
    if control_g is None:
        inputs.unknown["control plane"] = "what its machines draw: TELEMETRY_CONTROL_PLANE_W, which is booked"
    storage_kwh = inputs.take("storage", facts.storage_kwh, "its meter: `storage_kwh` in the facts")
    kwh = _kwh(report["total_accounts"]["facility_energy_j"])
    mean = _ratio(report["total"]["carbon_gco2"], kwh)
    storage_g = None if storage_kwh is None or mean is None else storage_kwh * mean
    embodied_g = _embodied_g(report, inputs)
    gpu_s, energy_j = report["total"]["gpu_s"], report["total"]["energy_j"]
    share = servers["energy_j"] / energy_j if energy_j else 0.0
    consumer = {
        "inference_gco2": servers["carbon_gco2"],
        **{"gateway_router_orchestration_gco2": control_g, "storage_gco2": storage_g},
        "embodied_gco2": None if embodied_g is None else embodied_g * share,
    }
    trained_g = sum(line["footprint"]["carbon_gco2"] for line in report["lines"]) - servers["carbon_gco2"]
    provider = {"training_gco2": trained_g, "embodied_gco2": None if embodied_g is None else embodied_g * (1 - share)}
    tokens = sum(line["input_tokens"] + line["output_tokens"] for line in requests["lines"])
    trained = {unit["unit"]: unit["amount"] for unit in report["units"]}
    flop = sum(each.value for each in facts.training_flop.values()) or None
    size = sum(each.value for each in facts.parameters_billion.values()) or None
    for what, stated in (("FLOP", facts.training_flop), ("parameters", facts.parameters_billion)):
        for name, each in stated.items():
            inputs.take(f"{what} of {name}", each, "")
    found = {
        "consumer": {
            **{"boundary": consumer, "functional_unit": "million tokens", "tokens": tokens},
            "sci_gco2e_per_million_tokens": _ratio(_sum(consumer.values()), tokens / 1e6),
        },
        "provider": {
            **{"boundary": provider, "values": "gross"},
            "sci_gco2e_per_1e15_flop": _ratio(_sum(provider.values()), flop and flop / 1e15),
            "sci_gco2e_per_1000_training_tokens": _ratio(_sum(provider.values()), trained.get("1000 tokens")),
            "sci_gco2e_per_billion_parameters": _ratio(_sum(provider.values()), size),
        },
        "gpu_hours": gpu_s / 3_600,
    }
    return inputs.framed("sci-ai", "SCI for AI, extending ISO/IEC 21031:2024", found, report)


def _sum(values: Iterable[float | None]) -> float | None:
    known: Sequence[float | None] = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _embodied_g(report: Mapping[str, Any], inputs: Inputs) -> float | None:
    """Return the GPUs' embodied emissions in the period: from the report, or else from the facts."""
    if (known := report["total_accounts"]["embodied_gco2"]) is not None:
        return known
    parts: list[float | None] = []
    for line in report["lines"]:
        kg = inputs.take(
            f"embodied emissions of {line['group']}",
            inputs.facts.embodied_kgco2.get(line["group"]),
            "the maker's product carbon footprint; `wattshift factors` has estimates",
        )
        parts.append(None if kg is None else 1_000 * kg * line["footprint"]["gpu_s"] / inputs.facts.device_lifetime_s)
    if report["idle"]["gpu_s"]:
        inputs.unknown["embodied emissions of idle GPUs"] = "TELEMETRY_EMBODIED_KGCO2 for every model"
    return _sum(parts) if not report["idle"]["gpu_s"] else None
