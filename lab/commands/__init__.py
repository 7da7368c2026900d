"""``wattshift lab``: experiments of many simulations, past requests in virtual time, single plans from a file,
models fitted to measurements, and forecasts learned from a file.

An entry point adds it to the command line.
"""

from __future__ import annotations

import typer

from lab.commands.allocation import allocation
from lab.commands.experiment import experiment
from lab.commands.fit import group as fit
from lab.commands.forecast import forecast
from lab.commands.inference import inference
from lab.commands.partition import partition
from lab.commands.placement import placement
from lab.commands.profile_inference import group as profile
from lab.commands.serving import serving

app = typer.Typer(help="Remake what papers say, and compare with it.", no_args_is_help=True)
for command in (allocation, experiment, forecast, inference, partition, placement, serving):
    app.command()(command)
app.add_typer(fit, name="fit")
app.add_typer(profile, name="profile")


@app.callback()
def _lab() -> None:
    """Remake what papers say, and compare with it."""
