"""``wattshift fleets``: GPUs set aside for applications, and the plans that cut them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import AsJson, Group
from services.cli.output import console
from services.cli.values import json_object
from services.core.domain.counted import counted

FleetArgument = Annotated[str, typer.Argument(metavar="NAME", help="The fleet's name.")]
WHY = {
    "first": "it is the first",
    "parameter": "the fleet or an application was changed",
    "gpus": "GPUs were lost or came back",
    "sla": "latency above an SLA",
    "accuracy": "accuracy below a floor",
    "intensity": "another intensity",
    "grid_order": "an order of the grid",
}


def register(app: typer.Typer) -> None:
    fleets = Group(app, "fleets", "Set GPUs aside for applications.", list_fleets)
    fleets.add(list_fleets, show_fleet, set_fleet, delete_fleet, plans=list_plans, apply=apply_plan)


def list_fleets(as_json: AsJson = False) -> None:
    """Show the fleets."""
    found = Gateway().pages("/v1/fleets")
    shown = output.table("fleet", ">GPUs", "model", "zone", "applications", "plan")
    for fleet in found:
        spec = fleet["spec"]
        there = spec["gpus"] - fleet["missing_gpus"]
        gpus = str(there) if there == spec["gpus"] else f"{there} of {spec['gpus']}"
        plan = plan_line(fleet["plan"])
        shown.add_row(fleet["name"], gpus, spec["gpu_model"], spec["zone"], ", ".join(fleet["apps"]), plan)
    output.tell(found, as_json, shown if found else "no fleets")


def show_fleet(name: FleetArgument, as_json: AsJson = False) -> None:
    """Show a fleet: its GPUs as they are cut, and its newest plan."""
    fleet = Gateway().get(f"/v1/fleets/{name}")
    if as_json:
        return output.print_json(fleet)
    spec = fleet["spec"]
    rows = {
        "fleet": fleet["name"],
        "GPUs": f"{spec['gpus']} {spec['gpu_model']} in {spec['zone']}"
        + (f", {fleet['missing_gpus']} missing" if fleet["missing_gpus"] else ""),
        "applications": ", ".join(fleet["apps"]) or "none",
        "plan": plan_line(fleet["plan"]),
    }
    if fleet["detail"]:
        rows["waits"] = fleet["detail"]
    if fleet["only_proposes"]:
        rows["only proposals"] = fleet["only_proposes"]
    console.print(output.in_rows(rows))
    shown = output.table("node", ">GPU", "slices", "state", "")
    for gpu in fleet["gpus"]:
        state = gpu["state"] if gpu["is_up"] else "node is away"
        wanted = "" if sorted(gpu["wanted"]) == sorted(gpu["sizes"]) else f"to be {slices(gpu['wanted'])}"
        shown.add_row(gpu["node_id"], str(gpu["gpu"]), slices(gpu["sizes"]), state, gpu["detail"] or wanted)
    if fleet["gpus"]:
        console.print(shown)
    show_configuration(fleet["plan"], as_percentages=bool(fleet["only_proposes"] and "MPS" in fleet["only_proposes"]))
    show_search(fleet["plan"])


def set_fleet(
    name: FleetArgument,
    file: Annotated[Path | None, typer.Argument(help="The fleet's spec as JSON; docs/apps.md describes it.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs.")] = None,
    gpu_model: Annotated[str | None, typer.Option(help="GPU model, as nodes report it.")] = None,
    zone: Annotated[str | None, typer.Option(help="Grid zone of the nodes.")] = None,
    evaluation: Annotated[
        Literal["model", "measured"] | None,
        typer.Option(help="How plans evaluate configurations: by the model, or by measurement."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set GPUs aside for applications, or change a fleet; the same spec again changes nothing.

    Options take precedence over the file; without one, --gpus, --gpu-model and --zone are needed.
    """
    spec = {} if file is None else json_object(file)
    given = {"gpus": gpus, "gpu_model": gpu_model, "zone": zone, "evaluation": evaluation}
    spec = {**spec, **{key: value for key, value in given.items() if value is not None}}
    fleet = Gateway().call("PUT", f"/v1/fleets/{name}", body=spec)
    output.tell(
        fleet,
        as_json,
        f"{name} is at revision {fleet['revision']}: {spec['gpus']} {spec['gpu_model']} in {spec['zone']}",
    )


def list_plans(
    name: FleetArgument,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show a fleet's plans, newest first."""
    found = Gateway().pages(f"/v1/fleets/{name}/plans", limit)
    shown = output.table("plan", "made", "because of", ">gCO2/kWh", "state", "instances")
    for plan in found:
        instances = "; ".join(f"{each['name']}: {configuration(each['instances'])}" for each in plan["applications"])
        search = plan["search"]
        is_told = search is not None and search["detail"] == plan["detail"]
        said = [each for each in (None if is_told else plan["detail"], searched(search)) if each]
        state = ": ".join([plan["state"], *said])
        shown.add_row(
            *(plan["id"], output.age(plan["made_at"]), _because(plan), f"{plan['gco2_per_kwh']:.0f}"),
            *(state, instances or ("the most accurate variants on whole GPUs" if plan.get("layouts") else "")),
        )
    output.tell(found, as_json, shown if found else "no plans")


def apply_plan(
    name: FleetArgument,
    plan: Annotated[str, typer.Argument(help="The proposed plan; `fleets plans` lists them.")],
    as_json: AsJson = False,
) -> None:
    """Carry out a proposed plan."""
    found = Gateway().call("POST", f"/v1/fleets/{name}/plans/{plan}/apply")
    output.tell(found, as_json, f"{plan} is {found['state'].replace('_', ' ')}")


def delete_fleet(name: FleetArgument, as_json: AsJson = False) -> None:
    """Delete a fleet: its GPUs are made whole and given back."""
    fleet = Gateway().call("DELETE", f"/v1/fleets/{name}")
    output.tell(fleet, as_json, f"{name} gives {counted(len(fleet['gpus']), 'GPU')} back")


def plan_line(plan: dict[str, Any] | None) -> str:
    """Return a plan's state in a few words."""
    if plan is None:
        return "none yet"
    state = plan["state"].replace("_", " ")
    at = f", {plan['gpu']} now" if plan["gpu"] else ""
    said = f": {plan['detail']}" if plan["detail"] else ""
    return f"{state} ({output.age(plan['made_at'])}, {_because(plan)}){at}{said}"


def _because(plan: dict[str, Any]) -> str:
    """Return why a plan was made, also where a later release has a reason that this one does not know."""
    trigger: str = plan["trigger"]
    return WHY.get(trigger, trigger.replace("_", " "))


def show_configuration(plan: dict[str, Any] | None, *, as_percentages: bool = False) -> None:
    """Print what a plan's applications run."""
    if plan is None or not plan["applications"]:
        return
    shown = output.table("application", "instances", ">GPUs", ">accuracy", ">p95", ">SLA", ">mgCO2")
    for each in plan["applications"]:
        shown.add_row(
            each["name"],
            configuration(each["instances"], as_percentages=as_percentages),
            str(each["gpus"]),
            f"{-each['accuracy_loss_pct']:+.2f} %",
            f"{each['p95_ms']:.1f} ms",
            f"{each['sla_p95_ms']:.1f} ms",
            f"{1_000 * each['carbon_gco2_per_request']:.4f}",
        )
    console.print(shown)


def searched(search: dict[str, Any] | None) -> str:
    """Return how far a search by measurement has got, in a few words."""
    if search is None:
        return ""
    took_s = _seconds(search["begun_at"], search["ended_at"]) or 0.0
    said = counted(len(search["evaluations"]), "evaluation")
    return f"{said} in {took_s:.0f} s. {search['detail']}" if search["detail"] else f"{said} so far"


def _seconds(start: str | None, end: str | None) -> float | None:
    start_at, end_at = output.instant(start), output.instant(end)
    return None if start_at is None or end_at is None else (end_at - start_at).total_seconds()


def show_search(plan: dict[str, Any] | None) -> None:
    """Print what was measured for configurations, beside what the model had predicted."""
    search = None if plan is None else plan["search"]
    if plan is None or search is None:
        return
    console.print(f"searched by measurement: {searched(search)}")
    if not search["evaluations"]:
        return
    chosen = {each["name"]: each["instances"] for each in plan["applications"]} if search["ended_at"] else {}
    figures = (">accuracy", ">p95 (model)", ">J/request (model)", ">objective (model)", ">late", ">ready after")
    shown = output.table("evaluation", "application", "instances", *figures)
    for number, evaluation in enumerate(search["evaluations"], 1):
        for each in evaluation["applications"]:
            is_chosen = each["measured"] is not None and chosen.get(each["name"]) == each["instances"]
            name = f"{number}, chosen" if is_chosen else str(number)
            took_s = _seconds(evaluation["begun_at"], evaluation["measured_from"])
            shown.add_row(
                *(name, each["name"], configuration(each["instances"])),
                *_measured(each),
                f"{each['late']} of {each['answered']}",
                "-" if took_s is None else f"{took_s:.0f} s",
            )
        if evaluation["detail"]:
            shown.add_row(str(number), "", evaluation["detail"], *[""] * len(figures))
    console.print(shown)


def _measured(each: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return an evaluation's figures as people read them, with the model's predictions in brackets."""
    measured, predicted = each["measured"] or {}, each["predicted"] or {}

    def both(name: str, form: str) -> str:
        values = (measured.get(name), predicted.get(name))
        own, model = ("-" if value is None else format(value, form) for value in values)
        return f"{own} ({model})"

    accuracy = measured.get("accuracy_pct")
    return (
        "-" if accuracy is None else f"{accuracy:.2f} %",
        f"{both('p95_ms', '.0f')} ms",
        both("energy_j_per_request", ".3g"),
        f"{both('objective_pct', '.1f')} %",
    )


PERCENTAGES = {"1g": "14 %", "2g": "28 %", "3g": "43 %", "4g": "57 %", "7g": "100 %"}


def configuration(instances: Sequence[dict[str, Any]], *, as_percentages: bool = False) -> str:
    """Return instances as people write them."""
    return ", ".join(
        f"{each['count']} {each['variant']} on {PERCENTAGES[each['slice']] if as_percentages else each['slice']}"
        for each in instances
    )


def slices(sizes: Sequence[int]) -> str:
    """Return a GPU's slices as people write them."""
    return ",".join(f"{size}g" for size in sizes) or "whole"
