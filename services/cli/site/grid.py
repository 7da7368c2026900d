"""Commands for orders of the grid."""

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
from services.kit.ids import new_id

_WATTS = re.compile(r"(\d+(?:\.\d+)?)\s*([kM]?)W", re.IGNORECASE)
SCALES = {"": 1.0, "k": 1e3, "m": 1e6}

Duration = Annotated[str | None, typer.Option("--for", metavar="DURATION", help="How long: 90s, 15m, 3h.")]
From = Annotated[
    str | None, typer.Option("--from", metavar="TIME", help="18:00, 2026-03-01T18:00, +6h; by default now.")
]
Order = Annotated[str, typer.Argument(metavar="ORDER", help="Its id.")]


def register(app: typer.Typer) -> None:
    grid = Group(app, "grid", "Orders of the grid to draw less, for a while.", list_orders)
    grid.add(order=give_order, show=show_order, amend=amend_order, withdraw=withdraw_order, report=report_order)


def list_orders(as_json: AsJson = False) -> None:
    """Show the orders, the newest first."""
    found = Gateway().pages("/v1/grid/orders", 50)
    shown = output.table("order", "state", "zone", "from", "until", "limit", "baseline", right=("limit", "baseline"))
    for order in found:
        times = _time(order["start_at"]), _time(order["end_at"])
        shown.add_row(
            order["id"], order["state"], order["zone"] or "(all)", *times, _limits(order), _power(order["baseline_w"])
        )
    output.tell(found, as_json, shown if found else "no orders")


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
    zone: Annotated[str | None, typer.Option(help="Only the nodes of this grid zone.")] = None,
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
    key = {"Idempotency-Key": new_id("order")}  # the client sends again what was not answered
    _tell(Gateway().call("POST", "/v1/grid/orders", body=body, headers=key), as_json)


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
    console.print(
        f"until {_time(found['until'])}: {_power(found['delivered_w'])} less than the baseline, "
        f"{_power(found['ordered_w'])} ordered; drawn {_power(found['mean_w'])} in the mean"
    )
    above, rebound = (
        "-" if found[each] is None else f"{100 * found[each]:.1f} %" for each in ("above_most", "rebound")
    )
    console.print(f"worst five minutes {above} above the limit, rebound {rebound}")
    shown = output.table("job", "before", "during", right=("before", "during"))
    for job in found["jobs"]:
        shown.add_row(job["job_id"] or "(idle)", _power(job["before_w"]), _power(job["during_w"]))
    console.print(shown)


def withdraw_order(order: Order, as_json: AsJson = False) -> None:
    """Withdraw an order; what it had slowed or stopped is released at once."""
    _tell(Gateway().call("DELETE", f"/v1/grid/orders/{order}"), as_json)


def _of_file(file: Path) -> list[dict[str, float]]:
    steps: list[dict[str, float]] = []
    for at, (line, row) in enumerate(read_cells(file)):
        try:
            minutes, value = row
            offset_s = 60 * float(minutes)
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
            share = float(text[:-1]) / 100
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


def _time(text: str) -> str:
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _limits(order: dict[str, Any]) -> str:
    steps = order["steps"]
    words = [_power(step["to_w"]) if step["cut"] is None else f"-{100 * step['cut']:g} %" for step in steps[:3]]
    return ", ".join(words) + (f" and {len(steps) - 3} more" if len(steps) > 3 else "")


def _power(watts: float | None) -> str:
    if watts is None:
        return "-"
    return f"{watts:.0f} W" if abs(watts) < 10_000 else f"{watts / 1e3:.1f} kW"
