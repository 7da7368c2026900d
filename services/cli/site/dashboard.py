"""Open the dashboard in a browser, signed in."""

import os
import sys
import webbrowser
from typing import Annotated

import typer

from services.cli.client import Gateway
from services.cli.output import console


def register(app: typer.Typer) -> None:
    app.command()(dashboard)


def dashboard(
    page: Annotated[str, typer.Argument(help="Its page, such as /jobs.")] = "/",
    print_link: Annotated[bool, typer.Option("--print", help="Print the link, and open no browser.")] = False,
) -> None:
    """Open the dashboard in a browser, signed in with your API key.

    The link works once, within a minute. Where there is no screen, it is printed.
    """
    gateway = Gateway()
    url = gateway.url.rstrip("/") + gateway.call("POST", "/sign-in/link", then=page)["path"]
    has_screen = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if print_link or not has_screen or not webbrowser.open(url):
        console.print(url)
