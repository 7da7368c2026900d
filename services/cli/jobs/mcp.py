"""Let an assistant submit, explain and account for jobs through the Model Context Protocol."""

import typer

from services.cli.client import api_key, gateway_url
from services.cli.commands import EXIT_USAGE, CliError


def register(app: typer.Typer) -> None:
    app.command()(mcp)


def mcp() -> None:
    """Serve submit, explain, what-if and report as tools of the Model Context Protocol.

    An assistant starts this and speaks to it over standard input and output. It may do whatever your API key may.
    """
    try:
        from wattshift.integrations.mcp import main
    except ModuleNotFoundError as error:
        if error.name not in ("mcp", "mcp.server"):
            raise
        raise CliError("this needs the package mcp: pip install 'wattshift[mcp]'", EXIT_USAGE) from None
    main(gateway_url(), api_key())
