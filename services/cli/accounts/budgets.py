"""Commands for budgets."""

from typing import Annotated

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, AsJson, CliError, Group
from services.cli.output import console
from services.contracts.budgets import BudgetAction

UNITS = {"gpu_h": "GPU hours", "kwh": "kWh", "gco2": "gCO2"}


def register(app: typer.Typer) -> None:
    Group(app, "budgets", "Show the budgets of this month, set or remove one.", list_budgets).add(
        set_budget, remove_budget
    )


def list_budgets(as_json: AsJson = False) -> None:
    """Show the budgets and how much of each is used this month."""
    found = Gateway().get("/v1/budgets")["items"]
    shown = output.table("budget", "tenant", "project", ">used", ">of", "unit", "beyond it", "state")
    for budget in found:
        state = "[red]exceeded[/]" if budget["exceeded"] else "within"
        words = UNITS[budget["quantity"]], budget["action"], state
        figures = f"{budget['used']:.4g}", f"{budget['amount']:g}"
        shown.add_row(budget["id"], budget["tenant_id"], budget["project"] or "(all)", *figures, *words)
    output.tell(found, as_json, shown if found else "no budgets")


def set_budget(
    project: Annotated[str | None, typer.Argument(help="The project; without one, all of the tenant's.")] = None,
    tenant: Annotated[str, typer.Option(help="Whose project it is.")] = "default",
    gpu_hours: Annotated[float | None, typer.Option(help="GPU hours per calendar month, in UTC.")] = None,
    kwh: Annotated[float | None, typer.Option(help="Kilowatt-hours of devices and hosts per month.")] = None,
    gco2: Annotated[float | None, typer.Option(help="Grams of CO2 per month, location-based.")] = None,
    then: Annotated[str, typer.Option(help="Beyond it: hold jobs that wait, or warn.")] = "hold",
    as_json: AsJson = False,
) -> None:
    """Set what a project may use per calendar month; each quantity has its own budget."""
    actions = [action.value for action in BudgetAction]
    if then not in actions:
        raise CliError(f"--then {then}: must be one of {', '.join(actions)}", EXIT_USAGE)
    given = {"gpu_h": gpu_hours, "kwh": kwh, "gco2": gco2}
    wanted = {quantity: amount for quantity, amount in given.items() if amount is not None}
    if not wanted:
        raise CliError("give an amount: --gpu-hours, --kwh or --gco2", EXIT_USAGE)
    gateway = Gateway()
    made = [
        gateway.call(
            "PUT",
            "/v1/budgets",
            body={"tenant_id": tenant, "project": project, "quantity": quantity, "amount": amount, "action": then},
        )
        for quantity, amount in wanted.items()
    ]
    if as_json:
        return output.print_json(made)
    for budget in made:
        used = f"{budget['used']:.4g} of {budget['amount']:g} {UNITS[budget['quantity']]}"
        console.print(f"{budget['id']}  {project or tenant}: {used} used in {budget['month']}, then {then}")


def remove_budget(budget: str) -> None:
    """Remove a budget; jobs that were held only by it are queued again."""
    Gateway().call("DELETE", f"/v1/budgets/{budget}")
    console.print(f"{budget} is removed")
