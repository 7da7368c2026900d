"""``wattshift lab``: experiments of many simulations, and past requests in virtual time; added by an entry point."""

from __future__ import annotations

import typer

from lab.commands.experiment import experiment
from lab.commands.inference import inference
from lab.commands.serving import serving

app = typer.Typer(help="Remake what papers say, and compare with it.", no_args_is_help=True)
for command in (experiment, inference, serving):
    app.command()(command)


@app.callback()
def _lab() -> None:
    """Remake what papers say, and compare with it."""
