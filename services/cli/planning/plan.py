"""``wattshift plan``: answers that need no control plane."""

import typer

from services.cli.planning.allocation import allocation
from services.cli.planning.partition import partition
from services.cli.planning.pools import pools
from services.cli.plugins import add_moved

group = typer.Typer(help="Plan without a control plane.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="plan")
    for command in (pools, partition, allocation):
        group.command()(command)
    add_moved(group, "plan ", ("placement",))


@group.callback()
def _plan() -> None:
    """Plan without a control plane."""
