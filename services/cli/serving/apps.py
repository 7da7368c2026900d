"""``wattshift apps``: applications with model variants of different accuracy, on fleets of GPUs cut into slices."""

from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import AsJson, Group
from services.cli.output import console
from services.cli.serving.fleets import configuration, plan_line, show_configuration, show_search
from services.cli.values import json_object, with_commands_filled

AppArgument = Annotated[str, typer.Argument(metavar="NAME", help="The application's name.")]


def register(app: typer.Typer) -> None:
    apps = Group(app, "apps", "Run applications on slices of GPUs.", list_apps)
    apps.add(list_apps, show_app, set_app, report, delete_app)


def list_apps(as_json: AsJson = False) -> None:
    """Show the applications."""
    found = Gateway().pages("/v1/apps")
    shown = output.table("application", "fleet", "running", ">requests/s", ">p95", ">accuracy")
    for app in found:
        seen = app["traffic"]
        name = f"{app['name']} (being deleted)" if app["is_deleted"] else app["name"]
        shown.add_row(
            *(name, app["spec"]["fleet"], configuration(app["running"]) or "nothing yet"),
            *(f"{seen['requests_per_s']:.1f}", _ms(seen["p95_ms"]), _percent(seen["accuracy_pct"])),
        )
    output.tell(found, as_json, shown if found else "no applications")


def show_app(name: AppArgument, as_json: AsJson = False) -> None:
    """Show an application: what of it runs and where, its limits, and the requests of the last minute."""
    gateway = Gateway()
    app = gateway.get(f"/v1/apps/{name}")
    instances = gateway.pages(f"/v1/apps/{name}/instances")
    if as_json:
        return output.print_json({**app, "live_instances": instances})
    spec, seen = app["spec"], app["traffic"]
    floor = spec["max_accuracy_loss_pct"]
    rows = {
        "application": f"{name}, being deleted" if app["is_deleted"] else name,
        "fleet": spec["fleet"],
        "limits": f"p95 of {spec['sla_p95_ms']:g} ms"
        + ("" if floor is None else f", at most {floor:g} % of accuracy lost")
        + f", lambda {spec['carbon_weight']:g}",
        "last minute": f"{seen['requests_per_s']:.1f} requests/s, p95 {_ms(seen['p95_ms'])}, "
        f"accuracy {_percent(seen['accuracy_pct'])}, {seen['failed']} failed",
        "plan": plan_line(app["plan"]),
    }
    if app["only_proposes"]:
        rows["only proposals"] = app["only_proposes"]
    console.print(output.in_rows(rows))
    show_configuration(app["plan"], as_percentages=bool(app["only_proposes"] and "MPS" in app["only_proposes"]))
    show_search(app["plan"])
    shown = output.table("instance", "variant", "slice", "state", "node", ">GPU", "since", "")
    for each in instances:
        gpu = "" if each["gpu"] is None else str(each["gpu"])
        shown.add_row(
            *(each["id"], each["variant"], each["slice"], each["state"], each["node_id"] or "", gpu),
            *(output.age(each["created_at"]), each["detail"] or ""),
        )
    console.print(shown if instances else "no instances")


def set_app(
    name: AppArgument,
    file: Annotated[Path, typer.Argument(help="The application's spec as JSON; docs/apps.md describes it.")],
    as_json: AsJson = False,
) -> None:
    """Create an application, or replace its spec; the same spec again changes nothing.

    In commands {python} stands for the Python of this installation, {examples} for the folder of examples and {variant}
    for the variant.
    """
    spec = with_commands_filled(json_object(file), "variants", "{variant}")
    app = Gateway().call("PUT", f"/v1/apps/{name}", body=spec)
    names = ", ".join(each["name"] for each in app["spec"]["variants"])
    output.tell(
        app, as_json, f"{name} is at revision {app['revision']} on fleet {app['spec']['fleet']}, variants {names}"
    )


def report(
    name: AppArgument,
    hours: Annotated[float, typer.Option(help="Hours before now.")] = 24,
    step_s: Annotated[float | None, typer.Option(help="Seconds per line; by default a twelfth of the time.")] = None,
    as_json: AsJson = False,
) -> None:
    """Report an application's variants over time, its accuracy, latency and emissions, beside BASE.

    BASE is the most accurate variant on whole GPUs that are always at work, modelled by its profile.
    """
    found = Gateway().get(f"/v1/apps/{name}/report", hours=hours, step_s=step_s or max(hours * 3_600 / 12, 5))
    if as_json:
        return output.print_json(found)
    if not found["requests"] and not found["energy_j"]:
        console.print("nothing yet")
        return
    shown = output.table("from", ">gCO2/kWh", ">requests", ">accuracy", ">p95", ">energy", ">gCO2", "variants")
    used = output.energies(step["energy_j"] for step in found["mix"])
    for step, energy in zip(found["mix"], used, strict=True):
        total = max(sum(step["by_variant"].values()), 1)
        mix = sorted(step["by_variant"].items(), key=lambda each: -each[1])
        shown.add_row(
            output.clock(step["start_at"], "%H:%M:%S"),
            "-" if step["gco2_per_kwh"] is None else f"{step['gco2_per_kwh']:.0f}",
            str(step["requests"]),
            _percent(step["accuracy_pct"]),
            _ms(step["p95_ms"]),
            energy,
            f"{step['carbon_gco2']:.3g}",
            ", ".join(f"{100 * count / total:.0f} % {variant}" for variant, count in mix),
        )
    console.print(shown)
    base, own, saved = found["base_gco2_per_1000"], found["gco2_per_1000"], found["carbon_saving_pct"]
    rows = {
        "requests": f"{found['requests']}, {found['failed']} failed",
        "accuracy": _percent(found["accuracy_pct"])
        + ("" if found["accuracy_loss_pct"] is None else f", {-found['accuracy_loss_pct']:+.2f} % against the best"),
        "p95": f"{_ms(found['p95_ms'])} of {found['sla_p95_ms']:g} ms"
        + ("" if found["sla_ok_share"] is None else f", kept in {100 * found['sla_ok_share']:.0f} % of the answers"),
        "energy": f"{output.energy(found['energy_j'])}, {output.carbon(found['carbon_gco2'])}",
        "per 1,000 requests": "-" if own is None else f"{own:.4g} gCO2 by the ledger",
        "BASE": "-" if base is None else f"{base:.4g} gCO2 per 1,000 requests, modelled",
        "saved": "-" if saved is None else f"{saved:.1f} %",
    }
    if found["evaluations"]:
        rows |= _evaluations(found["evaluations"])
    console.print(output.in_rows(rows))


def _evaluations(found: dict[str, Any]) -> dict[str, str]:
    """Return what searches by measurement did, in a few words."""
    unmeasured = f", {found['unmeasured']} could not be measured" if found["unmeasured"] else ""
    errors = [
        f"{name} {found[f'{name}_error_pct']:+.1f} %"
        for name in ("accuracy", "p95", "energy")
        if found[f"{name}_error_pct"] is not None
    ]
    return {
        "evaluations": f"{found['evaluations']} measured for {found['measuring_s']:.0f} s{unmeasured}; "
        f"{found['bringing_up_s']:.0f} s until instances were ready",
        "meanwhile": f"{found['late']} of {found['answered']} answers late, {found['failed']} failed",
        "model is off by": ", ".join(errors) or "-",
    }


def delete_app(name: AppArgument, as_json: AsJson = False) -> None:
    """Delete an application: its instances are drained, and it is gone once the last one has ended."""
    app = Gateway().call("DELETE", f"/v1/apps/{name}")
    output.tell(app, as_json, f"{name} is drained")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} %"
