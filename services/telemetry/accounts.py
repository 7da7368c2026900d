"""Accounts of emissions besides the location-based one: market-based, embodied, a baseline, SCI per functional unit.

The terms are those of the GHG Protocol's Scope 2 Guidance (location-based and market-based method) and of the SCI
specification (ISO/IEC 21031: ``SCI = (E I + M) / R`` with ``M = TE TS RS``); docs/method.md says how they are applied.
What is not known is None and named in ``unknown``: no default stands in for it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext

from services.contracts.reports import CarbonAccounts, FunctionalUnit, HalfWidth, ZoneIntensity
from services.core.accounting.uncertainty import Cell, half_widths
from services.core.domain.units import J_PER_KWH
from services.telemetry.repository.accounts import DoneRow, PartRow, SpentRow

TOKENS = 1_000.0  #: Tokens are counted in thousands

DIGITS = 100  #: Sums of the ledger are exact, and rounded once: they do not depend on what it is grouped by


@dataclass(frozen=True, slots=True)
class Inputs:
    """What an operator states about the installation."""

    market_gco2_per_kwh: Mapping[str, float]  #: Factor of a zone's contracts, or else of its residual mix
    embodied_kgco2: Mapping[str, float]  #: Embodied emissions of one GPU with its share of the server, by model
    device_lifetime_s: float  #: How long a GPU is expected to be used
    means: Mapping[str, float]  #: Mean intensity of each zone in the period, gCO2/kWh
    currency: str | None = None  #: That of the prices; None: none are known
    hourly: bool = True  #: Whether each line tells its hour, as daily sums do not


def accounts_of(parts: Iterable[PartRow], inputs: Inputs) -> CarbonAccounts:
    """Return the accounts of some energy; a sum with any unknown part is unknown."""
    by_zone: dict[str, Decimal] = defaultdict(Decimal)
    by_model: dict[str | None, Decimal] = defaultdict(Decimal)
    estimated = priced_j = Decimal()
    unpriced: set[str] = set()
    cells: dict[tuple[str, str], list[Decimal]] = defaultdict(lambda: [Decimal()] * 4)
    with localcontext(prec=DIGITS):
        for part in parts:
            by_zone[part.zone] += part.facility_energy_j
            by_model[part.model] += part.gpu_s
            estimated += part.estimated_gco2
            priced_j += part.priced_j or 0
            if part.unpriced or not inputs.hourly:
                unpriced.add(part.zone)
            cell = cells[part.node_id, part.zone]
            for place, amount in enumerate(
                (part.energy_j, part.estimated_energy_j, part.carbon_gco2, part.guessed_gco2)
            ):
                cell[place] += amount
        facility_j = float(sum(by_zone.values(), Decimal()))
    market: float | None = 0.0
    baseline: float | None = 0.0
    unknown = {f"price of electricity in {zone}" for zone in unpriced if inputs.currency}
    for zone, energy_j in sorted(by_zone.items()):
        kwh = float(energy_j) / J_PER_KWH
        market = _add(market, kwh, inputs.market_gco2_per_kwh.get(zone), f"market factor of {zone}", unknown)
        baseline = _add(baseline, kwh, inputs.means.get(zone), f"mean intensity of {zone}", unknown)
    gpu_s = {model: float(by_model[model]) for model in sorted(by_model, key=lambda model: model or "")}
    return CarbonAccounts(
        facility_energy_j=facility_j,
        estimated_gco2=float(estimated),
        market_gco2=market,
        baseline_gco2=baseline,
        money=None if unpriced or inputs.currency is None else float(priced_j) / J_PER_KWH,
        embodied_gco2=embodied_gco2(gpu_s, inputs, unknown),
        unknown=sorted(unknown),
        half_width=HalfWidth.of(half_widths(Cell(*at, *map(float, amounts)) for at, amounts in cells.items())),
    )


def embodied_gco2(gpu_s: Mapping[str | None, float], inputs: Inputs, unknown: set[str]) -> float | None:
    """Return the share of the GPUs' embodied emissions, gCO2, for the time that they were reserved; None if unknown.

    Args:
        gpu_s: GPU seconds by model; None stands for an unknown board.
        unknown: Gets the name of every input that is missing.

    Source: SCI specification, M = TE x TS x RS with TS = time reserved / expected lifespan and RS = 1 per GPU.
    """
    total: float | None = 0.0
    for model, seconds in gpu_s.items():
        kilograms = inputs.embodied_kgco2.get(model) if model is not None else None
        per_s = None if kilograms is None else 1_000 * kilograms / inputs.device_lifetime_s
        what = model or "boards of an unknown model or cut into slices"
        total = _add(total, seconds, per_s, f"embodied emissions of {what}", unknown)
    return total


def functional_units(spent: Sequence[SpentRow], done: Sequence[DoneRow], inputs: Inputs) -> list[FunctionalUnit]:
    """Return SCI per job and per unit of work, for the jobs whose work lies wholly within the period."""
    found: list[FunctionalUnit] = []
    jobs = sum(row.jobs for row in done)
    if jobs:
        found.append(_unit("job", float(jobs), jobs, spent, inputs))
    for row in done:
        if row.unit is not None:
            tokens = row.unit == "tokens"
            name = "1000 tokens" if tokens else row.unit.removesuffix("s")
            amount = row.done / TOKENS if tokens else row.done
            found.append(_unit(name, amount, row.jobs, [part for part in spent if part.unit == row.unit], inputs))
    return found


def _unit(name: str, amount: float, jobs: int, spent: Sequence[SpentRow], inputs: Inputs) -> FunctionalUnit:
    by_model: dict[str | None, float] = defaultdict(float)
    for row in spent:
        by_model[row.model] += row.gpu_s
    operational = sum(row.carbon_gco2 for row in spent)
    embodied = embodied_gco2(by_model, inputs, set())
    return FunctionalUnit(
        unit=name,
        amount=amount,
        jobs=jobs,
        operational_gco2=operational,
        embodied_gco2=embodied,
        sci_gco2_per_unit=None if embodied is None else (operational + embodied) / amount,
    )


def zone_intensities(parts: Iterable[PartRow], inputs: Inputs) -> list[ZoneIntensity]:
    """Return the mean intensity and the market factor of every zone in which energy was used."""
    return [
        ZoneIntensity(
            zone=zone,
            mean_gco2_per_kwh=inputs.means.get(zone),
            market_gco2_per_kwh=inputs.market_gco2_per_kwh.get(zone),
        )
        for zone in sorted({part.zone for part in parts})
    ]


def _add(total: float | None, amount: float, factor: float | None, name: str, unknown: set[str]) -> float | None:
    if amount == 0:
        return total
    if factor is None:
        unknown.add(name)
        return None
    return None if total is None else total + amount * factor
