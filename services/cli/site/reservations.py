"""Commands for reservations, and for the maintenance of nodes."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, AsJson, CliError, Group
from services.cli.output import console
from services.cli.site.grid import Duration, From
from services.cli.values import duration_s, time_of
from services.kit.ids import new_id

Zone = Annotated[str | None, typer.Option(help="Only the nodes of this grid zone.")]
Name = Annotated[str, typer.Option(help="What it is for.")]
SLOTS = 6  #: How many slots are shown, the cleanest first


def register(app: typer.Typer) -> None:
    app.command()(reserve)
    Group(app, "reservations", "Reserved GPUs and maintenance.", list_reservations).add(cancel)


def reserve(
    gpus: Annotated[int, typer.Option(min=1, help="How many, of one model in one zone.")],
    lasts: Duration = None,
    begin: From = None,
    cleanest: Annotated[bool, typer.Option("--cleanest", help="At the cleanest time, with --before.")] = False,
    before: Annotated[
        str | None, typer.Option(metavar="TIME", help="Friday, Tue 9:00, +2d: when it has to end.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="GPU model.")] = None,
    zone: Zone = None,
    tenant: Annotated[str | None, typer.Option(help="For its jobs; by default your own tenant's.")] = None,
    name: Name = "",
    as_json: AsJson = False,
) -> None:
    """Reserve GPUs for a time; the answer has the grams of each time that was free."""
    if cleanest != (before is not None) or (cleanest and begin):
        raise CliError("say when: --from TIME, or --cleanest --before TIME", EXIT_USAGE)
    body = {"gpus": gpus, "gpu_model": model, "zone": zone, "tenant_id": tenant, "name": name}
    _make(body | _times(lasts, begin, before), as_json)


def maintain(
    nodes: Annotated[list[str] | None, typer.Argument(metavar="NODE...")] = None,
    zone: Zone = None,
    lasts: Duration = None,
    begin: From = None,
    name: Name = "",
    as_json: AsJson = False,
) -> None:
    """Empty nodes for a time: jobs that end before by their limit run on, others are stopped in time."""
    if bool(nodes) == bool(zone):
        raise CliError("name nodes, or a --zone", EXIT_USAGE)
    _make(
        {"maintenance": True, "nodes": nodes or None, "zone": zone, "name": name} | _times(lasts, begin, None), as_json
    )


def list_reservations(as_json: AsJson = False) -> None:
    """Show what is reserved, the newest first."""
    found = Gateway().pages("/v1/reservations", 50)
    shown = output.table("reservation", "for", "state", "from", "until", "GPUs", "nodes", right=("GPUs",))
    for each in found:
        times = _time(each["start_at"]), _time(each["end_at"])
        gpus = str(sum(each["gpus"].values()))
        shown.add_row(each["id"], _holder(each), each["state"], *times, gpus, " ".join(sorted(each["gpus"])))
    output.tell(found, as_json, shown if found else "nothing is reserved")


def cancel(
    reservation: Annotated[str, typer.Argument(metavar="RESERVATION", help="Its id.")], as_json: AsJson = False
) -> None:
    """Cancel a reservation or a maintenance."""
    _tell(Gateway().call("DELETE", f"/v1/reservations/{reservation}"), as_json)


def _times(lasts: str | None, begin: str | None, before: str | None) -> dict[str, Any]:
    if lasts is None:
        raise CliError("say how long: --for 3h", EXIT_USAGE)
    now = datetime.now(UTC)
    at = {
        name: time_of(text, f"--{option}", now).isoformat() if text else None
        for name, option, text in (("start_at", "from", begin), ("before", "before", before))
    }
    return {**at, "duration_s": duration_s(lasts, "--for")}


def _make(body: dict[str, Any], as_json: bool) -> None:
    key = {"Idempotency-Key": new_id("reserve")}  # the client sends again what was not answered
    _tell(Gateway().call("POST", "/v1/reservations", body=body, headers=key), as_json)


def _tell(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return output.print_json(made)
    console.print(f"{made['id']}  {made['state']}")
    on = ", ".join(f"{node} ({gpus} GPUs)" for node, gpus in sorted(made["gpus"].items()))
    console.print(f"{_holder(made)} from {_time(made['start_at'])} until {_time(made['end_at'])} on {on}")
    if made["stays"]:
        console.print(f"may run on, as they may not be stopped: {', '.join(made['stays'])}")
    if made["slots"]:
        shown = output.table("from", "zone", "gCO2/kWh", "gCO2", "", right=("gCO2/kWh", "gCO2"))
        for slot in made["slots"][:SLOTS]:
            figures = f"{slot['intensity_gco2_per_kwh']:.0f}", f"{slot['carbon_gco2']:.0f}"
            shown.add_row(
                _time(slot["start_at"]), slot["zone"], *figures, "beyond the forecast" if slot["estimated"] else ""
            )
        console.print(shown)
        if len(made["slots"]) > SLOTS:
            console.print(f"and {len(made['slots']) - SLOTS} more slots; --json has all")


def _holder(made: dict[str, Any]) -> str:
    return made["tenant_id"] or "maintenance"


def _time(text: str) -> str:
    return datetime.fromisoformat(text).astimezone().strftime("%a %Y-%m-%d %H:%M")
