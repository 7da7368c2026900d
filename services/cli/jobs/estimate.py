"""``wattshift submit --test-only``: where and when jobs would start, and what they would emit."""

from datetime import UTC, datetime
from typing import Any

from services.cli import output
from services.cli.client import Gateway
from services.cli.output import console
from services.contracts.jobs import JobSpec
from services.core.domain.counted import counted

IS_NOW = "now is the greenest time that it has"


def show_estimates(gateway: Gateway, specs: list[JobSpec], *, as_json: bool) -> None:
    """Print what would become of each job if it were submitted now, on its own."""
    found = [gateway.call("POST", "/v1/jobs:estimate", body=spec) for spec in specs]
    if as_json:
        return output.print_json(found if len(found) > 1 else found[0])
    for spec, estimate in zip(specs, found, strict=True):
        for line in estimate_lines(spec.name, estimate, datetime.now(UTC)):
            console.print(line)
    if len(specs) > 1:
        console.print("Each job is estimated as if it were submitted alone.")
    console.print("Nothing was submitted.")


def estimate_lines(name: str, estimate: dict[str, Any], now: datetime) -> list[str]:
    size = estimate.get("slice")
    gpus = f"a {size} slice" if size else counted(estimate["gpus"], "GPU")
    what = "slices" if size else "GPUs"
    free = f"{estimate['free_gpus']} of {estimate['suitable_gpus']} suitable {what} are free"
    if estimate["starts_now"]:
        nodes = ", ".join(f"{share['node_id']}{share['devices']}" for share in estimate["placement"])
        first = f"[bold]{name}[/] is valid and would start now on {gpus}: {nodes}"
    else:
        first = f"[bold]{name}[/] is valid and would wait: {estimate['detail']} ({estimate['reason']})"
    lines = [first, f"  cluster: {free}, {_waiting(estimate['waiting_jobs'])}; policy {estimate['policy']}"]
    if not estimate["starts_now"]:
        expected = output.instant(estimate["expected_start_at"])
        ahead_s = 0.0 if expected is None else max((expected - now).total_seconds(), 0.0)
        when = f"in {output.duration(ahead_s)} ({output.clock(expected)})" if expected else "unknown"
        lines.append(f"  start: {when}")
    if estimate["duration_s"] is not None:
        lines.append(f"  length: {output.duration(estimate['duration_s'])}")
    lines.append(f"  if it began now: {_emission(estimate['now'], now)}")
    greenest = IS_NOW if is_now(estimate) else _emission(estimate["greenest"], now)
    lines.append(f"  in the next green window: {greenest}")
    return lines + [f"  [dim]{sentence}[/]" for sentence in estimate["assumptions"]]


def is_now(found: dict[str, Any]) -> bool:
    """Return whether the greenest time for a job begins now."""
    return bool(found["now"] and found["greenest"]) and found["now"]["starts_at"] == found["greenest"]["starts_at"]


def _waiting(jobs: int) -> str:
    return "no job waits" if jobs == 0 else counted(jobs, "job waits", "jobs wait")


def _emission(emission: dict[str, Any] | None, now: datetime) -> str:
    if emission is None:
        return "unknown"
    starts_at = output.instant(emission["starts_at"])
    ahead_s = (starts_at - now).total_seconds() if starts_at else 0.0
    return emission_words(emission) + (f", starting in {output.duration(ahead_s)}" if ahead_s > 60 else "")


def emission_words(emission: dict[str, Any], between: str = "") -> str:
    """Return what a job would emit, in all or per hour, and at which intensity; ``between`` follows the first."""
    total, per_hour = emission["carbon_gco2"], emission["carbon_gco2_per_hour"]
    hourly = "unknown" if per_hour is None else f"{output.carbon(per_hour)} CO2 per hour"
    amount = hourly if total is None else f"{output.carbon(total)} CO2{between}"
    return f"{amount} at {emission['intensity_gco2_per_kwh']:.0f} gCO2/kWh in {emission['zone']}"
