"""``wattshift endpoints``: model servers that others run, to which the router sends requests too."""

from pathlib import Path
from typing import Annotated

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import AsJson, Group
from services.cli.values import json_document

EndpointArgument = Annotated[str, typer.Argument(metavar="NAME", help="The endpoint's name.")]


def register(app: typer.Typer) -> None:
    endpoints = Group(app, "endpoints", "Register model servers that others run.", list_endpoints)
    endpoints.add(list_endpoints, set_endpoint, delete_endpoint)


def list_endpoints(as_json: AsJson = False) -> None:
    """Show the registered model servers."""
    found = Gateway().pages("/v1/endpoints")
    shown = output.table("endpoint", "models", "location", ">capacity", "url")
    for each in found:
        spec = each["spec"]
        url = f"{spec['url']} (draining)" if spec["draining"] else spec["url"]
        shown.add_row(each["name"], ", ".join(spec["models"]), spec["location"], str(spec["capacity"]), url)
    output.tell(found, as_json, shown if found else "no endpoints")


def set_endpoint(
    name: EndpointArgument,
    file: Annotated[Path, typer.Argument(help="The endpoint's spec as JSON; docs/api.md lists its fields.")],
    as_json: AsJson = False,
) -> None:
    """Register a model server, or replace its spec."""
    found = Gateway().call("PUT", f"/v1/endpoints/{name}", body=json_document(file))
    output.tell(found, as_json, f"{name} serves {', '.join(found['spec']['models'])} at {found['spec']['url']}")


def delete_endpoint(name: EndpointArgument, as_json: AsJson = False) -> None:
    """Deregister a model server; requests that it holds are finished."""
    found = Gateway().call("DELETE", f"/v1/endpoints/{name}")
    output.tell(found, as_json, f"{name} is given no more requests")
