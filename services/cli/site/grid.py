"""Commands for orders of the grid, and for reservations and the maintenance of nodes."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, AsJson, CliError, Group, with_records
from services.cli.output import console
from services.cli.values import duration_s, read_cells, time_of
from services.contracts.grid import NO_LIMIT_W
from services.core.domain.counted import counted
from services.kit.ids import new_id
from services.kit.text import decimal

_WATTS = re.compile(r"(\d+(?:\.\d+)?)\s*([kM]?)W", re.IGNORECASE)
SCALES = {"": 1.0, "k": 1e3, "m": 1e6}
UNHEARD = 0.02  #: Nodes report at different seconds: less than this is not said

Duration = Annotated[str | None, typer.Option("--for", metavar="DURATION", help="How long: 90s, 15m, 3h.")]
From = Annotated[
    str | None, typer.Option("--from", metavar="TIME", help="18:00, 2026-03-01T18:00, +6h; by default now.")
]
Zone = Annotated[str | None, typer.Option(help="Only the nodes of this grid zone.")]
Order = Annotated[str, typer.Argument(metavar="ORDER", help="Its id.")]


def register(app: typer.Typer) -> None:
    app.command()(reserve)
    Group(app, "reservations", "Reserved GPUs and maintenance.", list_reservations).add(cancel)
    grid = Group(app, "grid", "Orders of the grid to draw less, for a while.", list_orders)
    grid.add(order=give_order, show=show_order, amend=amend_order, withdraw=withdraw_order, report=report_order)


def list_orders(as_json: AsJson = False) -> None:
    """Show the orders, the newest first."""
    found = Gateway().newest("/v1/grid/orders", 50)
    shown = output.table("order", "state", "zone", "from", "until", ">limit", ">baseline", ">drawn", ">least")
    for order in found:
        times = _time(order["start_at"]), _time(order["end_at"])
        figures = (_power(order.get(name)) for name in ("baseline_w", "drawn_w", "least_w"))
        shown.add_row(order["id"], order["state"], order["zone"] or "(all)", *times, _limits(order), *figures)
    output.tell(found, as_json, shown if found else "no orders")
    for order in [] if as_json else found:
        _tell_shortfall(order, f"{order['id']}: ")


@dataclass
class Wanted:
    """What an order says, as typed; None is not given."""

    cut: Annotated[
        str | None, typer.Option(metavar="SHARE", help="What to leave out of the baseline, such as 35%.")
    ] = None
    to: Annotated[str | None, typer.Option(metavar="POWER", help="The most that may be drawn, such as 120kW.")] = None
    profile: Annotated[
        Path | None,
        typer.Option(help="A CSV file of minutes since the start and what holds from then on, such as 35% or 120kW."),
    ] = None
    begin: From = None
    lasts: Duration = None

    def given(self) -> dict[str, Any]:
        """Return the fields of an order that were given."""
        limits = {f"--{name}": value for name in ("cut", "to", "profile") if (value := getattr(self, name)) is not None}
        if len(limits) > 1:
            raise CliError(f"{' and '.join(limits)}: give one of them", EXIT_USAGE)
        found: dict[str, Any] = {}
        for option, value in limits.items():
            found["steps"] = _of_file(value) if option == "--profile" else [limit_of(value, option)]
        if self.lasts is not None:
            found["duration_s"] = duration_s(self.lasts, "--for")
        if self.begin is not None:
            found["start_at"] = time_of(self.begin, "--from", datetime.now(UTC)).isoformat()
        return found


@with_records
def give_order(
    wanted: Wanted,
    zone: Zone = None,
    notice: Annotated[
        str, typer.Option(metavar="DURATION", help="How long before its start the cluster may prepare.")
    ] = "0s",
    name: Annotated[str, typer.Option(help="What it is called.")] = "",
    as_json: AsJson = False,
) -> None:
    """Order the cluster to draw less."""
    given = wanted.given()
    if "steps" not in given:
        raise CliError("say how much: --cut 35%, --to 120kW or --profile FILE", EXIT_USAGE)
    if "duration_s" not in given:
        raise CliError("say how long: --for 3h", EXIT_USAGE)
    body = {"name": name, "zone": zone, "notice_s": duration_s(notice, "--notice"), **given}
    _tell(Gateway().call("POST", "/v1/grid/orders", body=body, key=new_id("order")), as_json)


def show_order(order: Order, as_json: AsJson = False) -> None:
    """Show an order."""
    _tell(Gateway().get(f"/v1/grid/orders/{order}"), as_json)


@with_records
def amend_order(order: Order, wanted: Wanted, as_json: AsJson = False) -> None:
    """Change an order that has not ended; what is not given stays as it is."""
    if not (body := wanted.given()):
        raise CliError("say what to change: --cut, --to, --profile, --from or --for", EXIT_USAGE)
    _tell(Gateway().call("PATCH", f"/v1/grid/orders/{order}", body=body), as_json)


def report_order(order: Order, as_json: AsJson = False) -> None:
    """Say what came of an order: what was cut, what came back after it, and each job's part."""
    found = Gateway().get(f"/v1/grid/orders/{order}/report")
    if as_json:
        return output.print_json(found)
    _tell(found["order"], as_json=False)
    for each in found.get("amended", ()):
        console.print(f"until it was amended at {_time(each['until'])}: {_limits(each)}")
    console.print(
        f"{_time(found['since'])} to {_time(found['until'])}: {_power(found['mean_w'])} drawn on average, a cut of "
        f"{_power(found['delivered_w'])}; ordered: {_power(found['limit_w'])}, a cut of {_power(found['ordered_w'])}"
    )
    above, rebound = (
        "less than a minute to judge" if found[each] is None else f"{100 * found[each]:.1f} % above the {of}"
        for each, of in (("above_most", "limit"), ("rebound", "baseline"))
    )
    console.print(f"worst five minutes: {above}; after the order: {rebound}")
    if found.get("counted_until"):
        console.print(f"by the lines of the ledger until {_time(found['counted_until'])}, when all nodes have some")
    if found.get("unheard", 0.0) > UNHEARD:  # an older installation does not say
        console.print(f"no meter readings for {100 * found['unheard']:.1f} % of its nodes' time, which count as 0 W")
    shown = output.table("job", ">before", ">during")
    for job in found["jobs"]:
        shown.add_row(job["job_id"] or "(no job)", _power(job["before_w"]), _power(job["during_w"]))
    shown.add_row("all", _power(found["baseline_w"]), _power(found["mean_w"]))
    console.print(shown)


def withdraw_order(order: Order, as_json: AsJson = False) -> None:
    """Withdraw an order; what it had slowed or stopped is released at once."""
    _tell(Gateway().call("DELETE", f"/v1/grid/orders/{order}"), as_json)


def _of_file(file: Path) -> list[dict[str, float]]:
    steps: list[dict[str, float]] = []
    for at, (line, row) in enumerate(read_cells(file)):
        try:
            minutes, value = row
            offset_s = 60 * decimal(minutes)
        except ValueError:
            if at:
                raise CliError(f"{file}, line {line}: expected minutes and a limit, got {row}", EXIT_USAGE) from None
            continue  # a header
        steps.append({"offset_s": offset_s, **limit_of(value.strip(), f"{file}, line {line}")})
    if not steps:
        raise CliError(f"{file} has no limits", EXIT_USAGE)
    return steps


def limit_of(text: str, option: str) -> dict[str, float]:
    """Return a limit as a step has it: ``35%`` of the baseline left out, or ``120kW``."""
    if option == "--cut" and not text.endswith("%"):
        text = f"{text}%"
    if text.endswith("%"):
        try:
            share = decimal(text[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 < share <= 1:
            raise CliError(f"{option}: {text!r} is not a share of the baseline; write 35%", EXIT_USAGE)
        return {"cut": share}
    found = _WATTS.fullmatch(text)
    if found is None:
        raise CliError(f"{option}: {text!r} is not a power; write 120kW, 1.2MW or 800W", EXIT_USAGE)
    return {"to_w": float(found[1]) * SCALES[found[2].lower()]}


def _tell(order: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return output.print_json(order)
    console.print(f"{order['id']}  {order['state']}")
    where = f"the zone {order['zone']}" if order["zone"] else "the cluster"
    console.print(f"{where} from {_time(order['start_at'])} until {_time(order['end_at'])}: {_limits(order)}")
    console.print(f"baseline {_power(order['baseline_w'])}, limit now {_power(order['limit_w'])}")
    if order.get("drawn_w") is not None:
        console.print(f"drawn now {_power(order['drawn_w'])}, can come down to {_power(order['least_w'])}")
    _tell_shortfall(order)


def _tell_shortfall(order: dict[str, Any], of: str = "") -> None:
    if order.get("shortfall"):  # an older installation does not say
        console.print(f"[yellow]{of}{order['shortfall']}[/yellow]")


def _time(text: str) -> str:
    return output.clock(text, output.SECONDS)


def _limits(order: dict[str, Any]) -> str:
    steps = order["steps"]
    words = [_limit(step) for step in steps[:3]]
    return ", ".join(words) + (f" and {len(steps) - 3} more" if len(steps) > 3 else "")


def _limit(step: dict[str, Any]) -> str:
    if step["cut"] is not None:
        return f"-{100 * step['cut']:g} %"
    return _power(step["to_w"]) if step["to_w"] < NO_LIMIT_W else "no limit"


def _power(watts: float | None) -> str:
    if watts is None:
        return "-"
    return f"{watts:.0f} W" if abs(watts) < 10_000 else f"{watts / 1e3:.1f} kW"


Name = Annotated[str, typer.Option(help="What it is for.")]
SLOTS = 6  #: How many slots are shown, the cleanest first


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
    found = Gateway().newest("/v1/reservations", 50)
    shown = output.table("reservation", "for", "state", "from", "until", ">GPUs", "nodes")
    for each in found:
        times = output.clock(each["start_at"]), output.clock(each["end_at"])
        gpus = str(sum(each["gpus"].values()))
        shown.add_row(each["id"], _holder(each), each["state"], *times, gpus, " ".join(sorted(each["gpus"])))
    output.tell(found, as_json, shown if found else "nothing is reserved")


def cancel(
    reservation: Annotated[str, typer.Argument(metavar="RESERVATION", help="Its id.")], as_json: AsJson = False
) -> None:
    """Cancel a reservation or a maintenance."""
    _tell_reserved(Gateway().call("DELETE", f"/v1/reservations/{reservation}"), as_json)


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
    _tell_reserved(Gateway().call("POST", "/v1/reservations", body=body, key=new_id("reserve")), as_json)


def _tell_reserved(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return output.print_json(made)
    console.print(f"{made['id']}  {made['state']}")
    on = ", ".join(f"{node} ({counted(gpus, 'GPU')})" for node, gpus in sorted(made["gpus"].items()))
    console.print(f"{_holder(made)} from {output.clock(made['start_at'])} until {output.clock(made['end_at'])} on {on}")
    if made["stays"]:
        console.print(f"may run on, as they may not be stopped: {', '.join(made['stays'])}")
    if made["slots"]:
        shown = output.table("from", "zone", ">gCO2/kWh", ">gCO2", "")
        for slot in made["slots"][:SLOTS]:
            figures = f"{slot['intensity_gco2_per_kwh']:.0f}", f"{slot['carbon_gco2']:.0f}"
            known = "beyond the forecast" if slot["estimated"] else ""
            shown.add_row(output.clock(slot["start_at"]), slot["zone"], *figures, known)
        console.print(shown)
        if len(made["slots"]) > SLOTS:
            console.print(f"and {len(made['slots']) - SLOTS} more slots; --json has all")


def _holder(made: dict[str, Any]) -> str:
    return made["tenant_id"] or "maintenance"
