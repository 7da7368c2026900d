"""``wattshift plan``: answers that need no control plane."""

import typer

from services.cli.commands import Group
from services.cli.planning.pools import pools
from services.cli.plugins import add_moved


def register(app: typer.Typer) -> None:
    plan = Group(app, "plan", "Plan without a control plane.")
    plan.add(pools=pools)
    add_moved(plan, {name: f"wattshift lab {name}" for name in ("allocation", "partition", "placement")})
